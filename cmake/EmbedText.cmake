# halfwire_embed_text(OUT_VARIABLE FILE SYMBOL): makes a source file in which `halfwire::...::SYMBOL`, a const char* with
# external linkage, is the text of FILE, and names it in OUT_VARIABLE. SYMBOL comes with its namespaces.
function(halfwire_embed_text out file symbol)
  get_filename_component(path ${file} ABSOLUTE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(READ ${path} HALFWIRE_TEXT)
  string(REGEX REPLACE "::[^:]*$" "" HALFWIRE_NAMESPACE ${symbol})
  string(REGEX REPLACE "^.*::" "" HALFWIRE_SYMBOL ${symbol})
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${HALFWIRE_SYMBOL}.cc)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [=[
namespace @HALFWIRE_NAMESPACE@ {
extern const char* const @HALFWIRE_SYMBOL@;
const char* const @HALFWIRE_SYMBOL@ = R"page(@HALFWIRE_TEXT@)page";
}  // namespace @HALFWIRE_NAMESPACE@
]=])
  set(${out} ${source} PARENT_SCOPE)
endfunction()
