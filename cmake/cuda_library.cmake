# moe_ext_cuda.so: a plain shared library for sm_90a, loaded by torch.ops.load_library. No Python symbols.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "moe_ext: MOE_EXT_BUILD_CUDA needs nvcc (CUDA 13): put it on PATH or set CUDACXX")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# PyPI's toolkit keeps its libraries in lib, while its nvcc looks in lib64: the variable serves CMake's trial builds.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_root)
cmake_path(GET cuda_root PARENT_PATH cuda_root)
if(EXISTS ${cuda_root}/lib/libcudart_static.a AND NOT EXISTS ${cuda_root}/lib64)
  set(ENV{LIBRARY_PATH} "${cuda_root}/lib:$ENV{LIBRARY_PATH}")
  string(APPEND CMAKE_SHARED_LINKER_FLAGS " -L${cuda_root}/lib")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "moe_ext: nvcc 13.0 or newer is needed, ${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_SOURCE_DIR}/tools/log_compile.sh)
if(CCACHE)
  list(APPEND CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

include(cmake/torch_stable.cmake)
include(cmake/kernel_instances.cmake)

if(NOT CUTLASS_INCLUDE_DIR)
  python_package_dir(cutlass_dir cutlass_library)
  find_path(CUTLASS_INCLUDE_DIR cutlass/cutlass.h PATHS ${cutlass_dir}/source/include NO_DEFAULT_PATH REQUIRED)
endif()

file(GLOB sources CONFIGURE_DEPENDS csrc/*.cpp csrc/common/*.cpp csrc/grouped_gemm/*.cpp csrc/grouped_gemm/*.cu
     csrc/quantize/*.cpp csrc/quantize/*.cu csrc/fused_moe/*.cpp csrc/fused_moe/*.cu
     csrc/routing/*.cpp csrc/routing/*.cu)
add_library(moe_ext_cuda SHARED ${sources} ${kernel_instances})
set_target_properties(moe_ext_cuda PROPERTIES PREFIX "" OUTPUT_NAME moe_ext_cuda)
target_include_directories(moe_ext_cuda SYSTEM PRIVATE ${CUTLASS_INCLUDE_DIR} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# Token tiles come in widths that are not powers of two, so all of WGMMA's shapes are wanted.
target_compile_definitions(moe_ext_cuda PRIVATE CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
# __FILE__ in headers must not bring the paths of the machine that builds. The last mapping that fits is used, and an
# environment may lie inside the source tree: so these must come after the source tree's, from a target linked later.
set(map_torch -fmacro-prefix-map=${MOE_EXT_TORCH_DIR}/=)
set(map_cutlass -fmacro-prefix-map=${CUTLASS_INCLUDE_DIR}/=)
target_compile_options(torch_stable INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${map_torch};${map_cutlass}>")
# Warnings about spills and local memory are errors: both mean a main loop that left its registers.
target_compile_options(
  moe_ext_cuda
  PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=,${map_torch},${map_cutlass}>"
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${MOE_EXT_LINEINFO}>>:-lineinfo>
)
target_link_libraries(moe_ext_cuda PRIVATE moe_ext_options torch_stable)
if(NOT CMAKE_BUILD_TYPE STREQUAL Debug)
  target_link_options(moe_ext_cuda PRIVATE -s)
endif()
# The static CUDA runtime must not offer its symbols to, or take them from, another copy in the process.
target_link_options(moe_ext_cuda PRIVATE -Wl,--exclude-libs,ALL)
# What nvcc's objects register with the CUDA runtime passes through csrc/preload.cpp.
target_link_options(moe_ext_cuda PRIVATE -Wl,--wrap=__cudaRegisterFunction)
install(TARGETS moe_ext_cuda LIBRARY DESTINATION moe_ext)
