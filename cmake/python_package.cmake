# Finds files inside installed Python packages without importing them (importing torch takes seconds).
# python_package_dir(<out> <package>): the package's directory, or <out>-NOTFOUND.
function(python_package_dir out package)
  execute_process(
    COMMAND
      ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('${package}'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE directory
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  if(directory STREQUAL "")
    set(directory ${out}-NOTFOUND)
  endif()
  set(${out} "${directory}" PARENT_SCOPE)
endfunction()
