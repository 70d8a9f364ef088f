# Flags every target shares. Contraction is off because the wire format is defined by
# separately rounded IEEE operations (docs/wire-format.md).
add_library(halfwire_options INTERFACE)
target_compile_options(halfwire_options INTERFACE -Wall -Wextra -Wno-missing-field-initializers -ffp-contract=off)
target_include_directories(halfwire_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
if(HALFWIRE_SANITIZE)
  target_compile_options(halfwire_options INTERFACE -fsanitize=${HALFWIRE_SANITIZE} -fno-omit-frame-pointer
                                                    -fno-sanitize-recover=undefined)
  target_link_options(halfwire_options INTERFACE -fsanitize=${HALFWIRE_SANITIZE})
endif()

# halfwire_library(name sources...): a static, position-independent library of one folder.
function(halfwire_library name)
  add_library(${name} STATIC ${ARGN})
  target_link_libraries(${name} PUBLIC halfwire_options Threads::Threads)
endfunction()
