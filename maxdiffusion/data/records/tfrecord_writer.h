// Writes TFRecord files of tf.Examples that MaxDiffusion's input pipeline reads: precomputed arrays, every feature a
// serialized TensorProto; or images and captions as bytes. Source: MaxDiffusion's TFRecord creators.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array.h"

namespace md {

/// Writes `folder`/file_00-1000.tfrec, file_01-2000.tfrec, …: the number of the file, and the number of records up to
/// its end if it is full. All files are written to a hidden folder next to it, which close() renames. Without close()
/// the destructor removes it; a killed process leaves it, and the next writer replaces it.
class TfrecordShards {
 public:
  /// Throws io if `folder` exists and is not empty, invalid_config if records_per_shard < 1.
  TfrecordShards(const std::string& folder, int64_t records_per_shard);
  ~TfrecordShards();
  /// Adds one record with these features; each of `numbers` is a list of one number.
  void add(const HostArrays& arrays, const std::map<std::string, int64_t>& numbers = {});
  void add(const std::map<std::string, std::string>& texts);
  /// Throws io when no record was added.
  void close();
  int64_t count() const { return count_; }

 private:
  void write(const std::string& example);
  std::string folder_, hidden_;
  int64_t records_per_shard_, count_ = 0;
  std::unique_ptr<FileWriter> writer_;
  bool closed_ = false;
};

}  // namespace md
