// metrics.jsonl: one JSON object per step and line, for scripts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace md {

/// One JSON object per line, appended: {"step": 12, "run_name": "…", "time": 1764106322.125, "loss": 0.5, …}; time:
/// seconds since 1970 when it was written. Not thread safe. Lines are buffered until flush(), destruction, a few
/// seconds or many bytes.
class JsonlWriter {
 public:
  /// Keeps complete lines of steps 1 … keep_through_step of an existing file; a resumed run writes later ones again. 0:
  /// starts a new file.
  JsonlWriter(const std::string& path, int64_t keep_through_step);
  ~JsonlWriter();
  /// NaN and infinity are written as null, which JSON allows.
  void write(int64_t step, const std::map<std::string, double>& values, const std::string& run_name);
  void flush();
  /// Step and values of each kept line.
  std::vector<std::pair<int64_t, std::map<std::string, double>>> retained() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
