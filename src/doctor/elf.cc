#include "doctor/elf.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

namespace halfwire {
namespace {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info{};
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
      void* memory = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
      if (memory != MAP_FAILED)
        bytes_ = {static_cast<const char*>(memory), static_cast<size_t>(info.st_size)};
    }
    if (fd >= 0) close(fd);
  }
  ~MappedFile() {
    if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::string_view bytes() const { return bytes_; }

 private:
  std::string_view bytes_;
};

// A copy of the T at `offset`; false where the file ends before it.
template <class T>
bool readAt(std::string_view file, uint64_t offset, T* out) {
  if (offset > file.size() || file.size() - offset < sizeof(T)) return false;
  std::memcpy(out, file.data() + offset, sizeof(T));
  return true;
}

// The zero-terminated string at `offset` of `table`; empty where it does not end inside.
std::string_view stringAt(std::string_view table, uint64_t offset) {
  if (offset >= table.size()) return {};
  const std::string_view rest = table.substr(offset);
  const size_t end = rest.find('\0');
  return end == std::string_view::npos ? std::string_view() : rest.substr(0, end);
}

std::string_view contents(std::string_view file, const Elf64_Shdr& section) {
  if (section.sh_type == SHT_NOBITS || section.sh_offset > file.size()) return {};
  return file.substr(section.sh_offset, section.sh_size);
}

}  // namespace

Result<ElfFacts> readElf(const std::string& path) {
  const MappedFile mapped(path);
  const std::string_view file = mapped.bytes();
  const auto bad = [&](const char* why) { return Status(StatusCode::kInvalidData, path + " " + why); };
  Elf64_Ehdr header;
  if (file.empty()) return Status(StatusCode::kUnavailable, path + " cannot be read");
  if (!readAt(file, 0, &header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return bad("is not an ELF file");
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB)
    return bad("is not for this machine");
  if (header.e_shentsize != sizeof(Elf64_Shdr)) return bad("has no section table that can be read");

  ElfFacts facts;
  const auto section = [&](uint64_t index, Elf64_Shdr* out) {
    return index < header.e_shnum && readAt(file, header.e_shoff + index * sizeof(Elf64_Shdr), out);
  };
  Elf64_Shdr s;
  for (uint64_t i = 0; section(i, &s); ++i) {
    Elf64_Shdr strings_header;
    if ((s.sh_type != SHT_DYNAMIC && s.sh_type != SHT_DYNSYM) || !section(s.sh_link, &strings_header))
      continue;
    const std::string_view strings = contents(file, strings_header);
    const std::string_view data = contents(file, s);
    Elf64_Dyn entry;
    for (uint64_t at = 0; s.sh_type == SHT_DYNAMIC && readAt(data, at, &entry) && entry.d_tag != DT_NULL;
         at += sizeof entry) {
      if (entry.d_tag == DT_NEEDED) facts.needed.emplace_back(stringAt(strings, entry.d_un.d_val));
    }
    Elf64_Sym symbol;
    for (uint64_t at = 0; s.sh_type == SHT_DYNSYM && readAt(data, at, &symbol); at += sizeof symbol) {
      if (stringAt(strings, symbol.st_name) != "ncclAllReduce") continue;
      (symbol.st_shndx == SHN_UNDEF ? facts.uses_nccl : facts.defines_nccl) = true;
    }
  }
  facts.carries_nccl = memmem(file.data(), file.size(), "NCCL version ", 13) != nullptr;
  return facts;
}

}  // namespace halfwire
