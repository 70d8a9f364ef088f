#include "trace/byte_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace halfwire::trace {
namespace {

class MemorySource : public ByteSource {
 public:
  explicit MemorySource(std::string_view bytes) : bytes_(bytes) {}
  Result<size_t> read(char* to, size_t size) override {
    const size_t n = std::min(size, bytes_.size() - position_);
    std::memcpy(to, bytes_.data() + position_, n);
    position_ += n;
    return n;
  }
  uint64_t position() const override { return position_; }
  uint64_t size() const override { return bytes_.size(); }

 private:
  std::string_view bytes_;
  size_t position_ = 0;
};

class PlainFile : public ByteSource {
 public:
  PlainFile(int fd, std::string path, uint64_t size) : fd_(fd), path_(std::move(path)), size_(size) {}
  ~PlainFile() override { ::close(fd_); }
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  Result<size_t> read(char* to, size_t size) override {
    size_t got = 0;
    while (got < size) {
      const ssize_t n = ::read(fd_, to + got, size - got);
      if (n == 0) break;
      if (n < 0) {
        if (errno == EINTR) continue;
        return Status(StatusCode::kInvalidData, fmt::format("{}: reading at byte {} failed: {}", path_,
                                                            position_, std::strerror(errno)));
      }
      got += static_cast<size_t>(n);
      position_ += static_cast<uint64_t>(n);
    }
    return got;
  }
  uint64_t position() const override { return position_; }
  uint64_t size() const override { return size_; }

 private:
  int fd_;
  std::string path_;
  uint64_t size_;
  uint64_t position_ = 0;
};

class GzipFile : public ByteSource {
 public:
  GzipFile(gzFile file, std::string path, uint64_t size) : file_(file), path_(std::move(path)), size_(size) {
    gzbuffer(file_, 256 * 1024);
  }
  ~GzipFile() override { gzclose_r(file_); }
  GzipFile(const GzipFile&) = delete;
  GzipFile& operator=(const GzipFile&) = delete;

  Result<size_t> read(char* to, size_t size) override {
    size_t got = 0;
    while (got < size) {
      const auto want = static_cast<unsigned>(std::min<size_t>(size - got, 1U << 30));
      const int n = gzread(file_, to + got, want);
      int error = Z_OK;
      gzerror(file_, &error);
      // At a cut-off stream gzread returns what it has and only then reports Z_BUF_ERROR.
      if (n < 0 || error == Z_BUF_ERROR || error == Z_DATA_ERROR) {
        return Status(
            StatusCode::kInvalidData,
            fmt::format("{}: the gzip data is {} at byte {} of {}: copy or record the file again", path_,
                        error == Z_BUF_ERROR ? "cut short" : "damaged", gzoffset(file_), size_));
      }
      if (n == 0) break;
      got += static_cast<size_t>(n);
    }
    return got;
  }
  uint64_t position() const override { return static_cast<uint64_t>(std::max<z_off_t>(0, gzoffset(file_))); }
  uint64_t size() const override { return size_; }
  bool compressed() const override { return true; }

 private:
  gzFile file_;
  std::string path_;
  uint64_t size_;
};

}  // namespace

std::unique_ptr<ByteSource> memorySource(std::string_view bytes) {
  return std::make_unique<MemorySource>(bytes);
}

Result<std::unique_ptr<ByteSource>> openFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return Status(StatusCode::kInvalidData,
                  fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  }
  struct stat info{};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return Status(StatusCode::kInvalidData, fmt::format("{}: is not a regular file", path));
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  unsigned char magic[2] = {0, 0};
  const bool gzip = ::pread(fd, magic, 2, 0) == 2 && magic[0] == 0x1f && magic[1] == 0x8b;
  if (!gzip) return std::unique_ptr<ByteSource>(new PlainFile(fd, path, size));
  gzFile file = gzdopen(fd, "rb");  // takes the descriptor over
  if (file == nullptr) {
    ::close(fd);
    return Status(StatusCode::kOutOfMemory, fmt::format("{}: no memory for decompression", path));
  }
  return std::unique_ptr<ByteSource>(new GzipFile(file, path, size));
}

}  // namespace halfwire::trace
