// Writes TFRecord files of tf.Examples that the reference's input pipeline reads: arrays computed beforehand, every
// feature a serialized TensorProto, or pictures and captions as bytes. Source: the reference's TFRecord creators.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array.h"

namespace md {

/// `folder`/file_00-1000.tfrec, file_01-2000.tfrec, …: the number of the file, and of the records up to its end if it
/// is full. Until close() everything lies in a hidden folder beside, which then gets the name at once; without close()
/// nothing is left, or, of a killed process, that hidden folder, which the next one replaces.
class TfrecordShards {
 public:
  /// Throws io where `folder` is and holds something, invalid_config for less than one record in a file.
  TfrecordShards(const std::string& folder, int64_t records_per_shard);
  ~TfrecordShards();
  /// One record: its features.
  void add(const HostArrays& arrays);
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
