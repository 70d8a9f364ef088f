#include "parity/record.h"

namespace halfwire::parity {

void RankRecord::truncate(size_t rows) {
  if (rows >= step.size()) return;
  step.resize(rows);
  const auto cut = [&](auto& column, auto&) { column.truncate(rows); };
  forColumns(*this, *this, cut);
  for (Group& g : groups) Group::forColumns(g, g, cut);
  std::erase_if(resumes, [&](const Resume& at) { return at.row >= rows; });
}

void RankRecord::append(const RankRecord& part) {
  const size_t keep = std::lower_bound(step.begin(), step.end(), part.step.front()) - step.begin();
  replaced_rows += rows() - keep;
  truncate(keep);
  const size_t from = rows(), most = from + part.rows();
  step.insert(step.end(), part.step.begin(), part.step.end());
  const auto copy = [&](auto& column, const auto& more) {
    if (more.empty()) return;
    for (size_t row = 0; row < part.rows(); ++row) {
      if (more.has(row)) column.set(from + row, more[row], most);
    }
  };
  forColumns(*this, part, copy);
  if (groups.size() < part.groups.size()) groups.resize(part.groups.size());
  for (size_t g = 0; g < part.groups.size(); ++g) Group::forColumns(groups[g], part.groups[g], copy);
  bool resume_at_start = false;
  for (Resume r : part.resumes) {
    resume_at_start = resume_at_start || r.row == 0;
    if (r.row == 0 && !r.tied) r.tied = part.header.tied;
    r.row += from;
    resumes.push_back(r);
  }
  if (!resume_at_start) {
    resumes.push_back({from, part.step.front(), part.header.tied});
    std::sort(resumes.begin(), resumes.end(), [](const Resume& a, const Resume& b) { return a.row < b.row; });
  }
  cut_short = part.cut_short;
}

}  // namespace halfwire::parity
