# The target `torch_stable`: headers and link line for LibTorch's stable ABI, nothing of ATen or c10.
set(MOE_EXT_TORCH_DIR "" CACHE PATH "Directory of the torch package (default: the interpreter's)")
set(MOE_EXT_TORCH_TARGET 0x020A000000000000 CACHE STRING "Oldest torch the library must load in (2.10)")

if(NOT MOE_EXT_TORCH_DIR)
  python_package_dir(torch_dir torch)
  if(NOT torch_dir)
    message(FATAL_ERROR "moe_ext: the CUDA library needs torch >= 2.10's headers, ${Python_EXECUTABLE} has no torch")
  endif()
  set(MOE_EXT_TORCH_DIR ${torch_dir} CACHE PATH "" FORCE)
endif()

# Newer than the headers, a target version is accepted in silence and then misses symbols.
file(READ ${MOE_EXT_TORCH_DIR}/include/torch/headeronly/version.h version_h)
string(REGEX MATCH "TORCH_VERSION_MAJOR +([0-9]+)" _ "${version_h}")
set(torch_version ${CMAKE_MATCH_1})
string(REGEX MATCH "TORCH_VERSION_MINOR +([0-9]+)" _ "${version_h}")
string(APPEND torch_version .${CMAKE_MATCH_1})
if(torch_version VERSION_LESS 2.10)
  message(FATAL_ERROR "moe_ext: torch >= 2.10 is needed, ${MOE_EXT_TORCH_DIR} holds ${torch_version}")
endif()
message(STATUS "moe_ext: torch ${torch_version} in ${MOE_EXT_TORCH_DIR}")

# The CUDA shims hide behind USE_CUDA; their symbols come from libtorch_cuda at load time, so they may stay
# undefined here and a CPU-only torch serves as build environment. libtorch.so itself exports nothing: without
# --no-as-needed a linker may drop it, and with it the path to libtorch_cuda.
add_library(torch_stable INTERFACE)
# Kernels see no torch at all, so it is for C++ sources alone.
target_include_directories(torch_stable SYSTEM INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${MOE_EXT_TORCH_DIR}/include>)
target_compile_definitions(
  torch_stable
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:USE_CUDA> $<$<COMPILE_LANGUAGE:CXX>:TORCH_TARGET_VERSION=${MOE_EXT_TORCH_TARGET}>
)
target_link_libraries(torch_stable INTERFACE -Wl,--no-as-needed ${MOE_EXT_TORCH_DIR}/lib/libtorch.so -Wl,--as-needed)
