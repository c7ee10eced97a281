# moe_ext._planner: the host twin of the tile scheduler and the list of kernels. Seconds to build, no CUDA.
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "moe_ext: Python.h of ${Python_EXECUTABLE} is missing (Debian: python3-dev)")
endif()

# torch ships pybind11's headers too, which serves machines where nothing can be installed.
if(NOT PYBIND11_INCLUDE_DIR)
  python_package_dir(pybind11_dir pybind11)
  python_package_dir(torch_dir torch)
  find_path(
    PYBIND11_INCLUDE_DIR pybind11/pybind11.h
    PATHS ${pybind11_dir}/include ${MOE_EXT_TORCH_DIR}/include ${torch_dir}/include
    NO_DEFAULT_PATH REQUIRED
  )
endif()

Python_add_library(_planner MODULE WITH_SOABI csrc/planner/planner.cpp)
target_include_directories(_planner SYSTEM PRIVATE ${PYBIND11_INCLUDE_DIR})
target_link_libraries(_planner PRIVATE moe_ext_options)
if(NOT CMAKE_BUILD_TYPE STREQUAL Debug)
  target_link_options(_planner PRIVATE -s)
endif()
install(TARGETS _planner LIBRARY DESTINATION moe_ext)
