#include "parity/other_readers.h"
#include "parity/reports.h"
namespace halfwire::parity {
static Status no() { return Status(StatusCode::kInvalidData, "not a record"); }
Result<Run> readCsv(const std::string&, const Progress&) { return no(); }
Result<Run> readTensorBoard(const std::vector<std::string>&, const Progress&) { return no(); }
Result<Run> readTrainerState(const std::string&) { return no(); }
Result<Run> readMegatronLog(const std::string&, const Progress&) { return no(); }
bool looksLikeTensorBoard(std::string_view, std::string_view) { return false; }
bool looksLikeMegatron(std::string_view) { return false; }
std::string parityHtml(const Comparison&, const Inputs&) { return ""; }
}  // namespace halfwire::parity
