# Turns csrc/grouped_gemm/configs.def into sources, in `kernel_instances`: a family of rows (same order, dtype,
# accumulation and output) shares files of at most MOE_EXT_ROWS_PER_FILE rows, because a row alone in a file compiles
# three times as long as a further one. Each row is pasted, not included: editing it recompiles its own file only.
set(table ${CMAKE_SOURCE_DIR}/csrc/grouped_gemm/configs.def)
set(template ${CMAKE_SOURCE_DIR}/csrc/grouped_gemm/instance.cu.in)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table} ${template})
file(STRINGS ${table} rows REGEX "^MOE_EXT_CONFIG\\(")

set(files "")
foreach(row IN LISTS rows)
  set(word "([A-Za-z0-9_]+)")
  if(NOT row MATCHES "^MOE_EXT_CONFIG\\( *${word} *, *${word} *, *${word} *, *${word} *, *${word} *,")
    message(FATAL_ERROR "configs.def: a row must begin with id, order, dtype, accumulate, output: ${row}")
  endif()
  set(id ${CMAKE_MATCH_1})
  string(TOLOWER "${CMAKE_MATCH_2}_${CMAKE_MATCH_3}_${CMAKE_MATCH_4}_${CMAKE_MATCH_5}" family)
  if(NOT DEFINED count_${family})
    set(count_${family} 0)
  endif()
  math(EXPR part "${count_${family}} / ${MOE_EXT_ROWS_PER_FILE}")
  math(EXPR count_${family} "${count_${family}} + 1")
  set(file ${family}_${part})
  list(APPEND files ${file})
  string(APPEND rows_${file} "${row}\n")
  string(
    APPEND instances_${file}
    "template void moe_ext::grouped_gemm::launch<moe_ext::grouped_gemm::configs::${id}>(\n"
    "    moe_ext::grouped_gemm::Params const&, cudaStream_t);\n"
    "template void moe_ext::grouped_gemm::prepare<moe_ext::grouped_gemm::configs::${id}>(int);\n"
  )
endforeach()
list(REMOVE_DUPLICATES files)

set(kernel_instances "")
foreach(file IN LISTS files)
  set(CONFIG_ROWS "${rows_${file}}")
  set(CONFIG_INSTANCES "${instances_${file}}")
  configure_file(${template} ${CMAKE_BINARY_DIR}/grouped_gemm/${file}.cu @ONLY)
  list(APPEND kernel_instances ${CMAKE_BINARY_DIR}/grouped_gemm/${file}.cu)
endforeach()
list(LENGTH rows num_rows)
list(LENGTH files num_files)
message(STATUS "moe_ext: ${num_rows} kernels in ${num_files} files")
