// metrics.jsonl: one JSON object per step and line, for scripts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace md {

/// One JSON object per line, appended: {"step": 12, "run_name": "…", "loss": 0.5, …}. Not thread safe. Lines reach the
/// file at flush(), at destruction, or when a few seconds or many bytes have gathered.
class JsonlWriter {
 public:
  /// Of an existing file, whole lines of steps 1 … keep_through_step are kept; a resumed run writes the later ones
  /// again. 0 starts a new file.
  JsonlWriter(const std::string& path, int64_t keep_through_step);
  ~JsonlWriter();
  /// A value that is not finite is written as null, because JSON has no other word for it.
  void write(int64_t step, const std::map<std::string, double>& values, const std::string& run_name);
  void flush();
  /// Step and numbers of each kept line.
  std::vector<std::pair<int64_t, std::map<std::string, double>>> kept() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
