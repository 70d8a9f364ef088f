# What a sanitizer's runtime reads, for every test.
set(HALFWIRE_SANITIZER_ENVIRONMENT "")
if(HALFWIRE_SANITIZE MATCHES "thread")
  set(HALFWIRE_SANITIZER_ENVIRONMENT
      "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/tsan_suppressions.txt:second_deadlock_stack=1")
endif()

# halfwire_test(name SOURCES a_test.cc [LIBS ...] [LABELS quick|gpu|...] [TIMEOUT seconds])
# A GoogleTest program registered with CTest. Without LABELS a test is in the full suite only.
function(halfwire_test name)
  if(NOT HALFWIRE_TESTS)
    return()
  endif()
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE halfwire_options ${arg_LIBS} GTest::gtest GTest::gmock GTest::gmock_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABELS}")
  set_property(TEST ${name} PROPERTY ENVIRONMENT
    "HALFWIRE_SOURCE_DIR=${CMAKE_SOURCE_DIR};HALFWIRE_BUILD_DIR=${CMAKE_BINARY_DIR};${HALFWIRE_SANITIZER_ENVIRONMENT}")
endfunction()
