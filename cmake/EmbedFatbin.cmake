# embed_fatbin(target source symbol): compiles a .cu file to a fat binary and embeds it in `target`
# as `symbol` and `symbol_size`. CMake's own CUDA language is not used: 3.25 drops the C++20 flag.
if(HALFWIRE_CUDA STREQUAL "OFF")
  set(HALFWIRE_NVCC "")
else()
  find_program(HALFWIRE_NVCC_PROGRAM nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(HALFWIRE_NVCC_PROGRAM)
    set(HALFWIRE_NVCC ${HALFWIRE_NVCC_PROGRAM})
  elseif(HALFWIRE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "HALFWIRE_CUDA=ON but nvcc was not found; set CUDA_HOME to the CUDA toolkit")
  endif()
endif()

function(embed_fatbin target source symbol)
  set(gen)
  foreach(a IN LISTS HALFWIRE_CUDA_ARCHS)
    string(REGEX REPLACE "-.*" "" n ${a})
    if(a MATCHES "virtual")
      list(APPEND gen -gencode=arch=compute_${n},code=compute_${n})
    else()
      list(APPEND gen -gencode=arch=compute_${n},code=sm_${n})
    endif()
  endforeach()
  get_filename_component(name ${source} NAME_WE)
  set(fat ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
  set(asm ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin.S)
  add_custom_command(OUTPUT ${fat}
    COMMAND ${HALFWIRE_NVCC} --fatbin ${gen} --threads=0 --compress-mode=size -std=c++20 -O3 -fmad=false
      --expt-relaxed-constexpr -ccbin=${CMAKE_CXX_COMPILER} -I${CMAKE_SOURCE_DIR}/src
      -MD -MF ${fat}.d -o ${fat} ${CMAKE_CURRENT_SOURCE_DIR}/${source}
    MAIN_DEPENDENCY ${CMAKE_CURRENT_SOURCE_DIR}/${source} DEPFILE ${fat}.d COMMENT "nvcc ${source}" VERBATIM COMMAND_EXPAND_LISTS)
  file(CONFIGURE OUTPUT ${asm} @ONLY CONTENT [=[
    .section .rodata
    .balign 64
    .globl @symbol@
    .hidden @symbol@
    .type @symbol@, @object
@symbol@:
    .incbin "@fat@"
.L@symbol@_end:
    .size @symbol@, .-@symbol@
    .balign 8
    .globl @symbol@_size
    .hidden @symbol@_size
@symbol@_size:
    .quad .L@symbol@_end - @symbol@
    .section .note.GNU-stack,"",@progbits
]=])
  set_source_files_properties(${asm} PROPERTIES OBJECT_DEPENDS ${fat})
  target_sources(${target} PRIVATE ${asm} ${fat})
endfunction()
