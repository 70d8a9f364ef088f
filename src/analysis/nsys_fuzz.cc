// Any bytes as an SQLite export.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "analysis/account.h"
#include "trace/nsys_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halfwire;
  static const trace::CommPatterns patterns = trace::CommPatterns::create({}).value();
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0) std::abort();
  if (::write(fd, data, size) == static_cast<ssize_t>(size)) {
    const auto t = trace::readNsys("/proc/self/fd/" + std::to_string(fd), patterns);
    if (t.ok()) {
      for (const analysis::Lane& lane : analysis::accountLanes(t.value())) {
        const auto& p = lane.total;
        if (p.compute + p.exposed + p.copy_alone + p.idle != p.span) std::abort();
      }
    }
  }
  ::close(fd);
  return 0;
}
