// Writes arrays that were computed beforehand as TFRecord files which the reference's input pipeline reads: a
// tf.Example each, every feature a serialized TensorProto. Source: the reference's TFRecord creator.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array.h"

namespace md {

/// `folder`/shard-00000-of-00128.tfrecord and so on; record i goes to shard i mod shards. Files have their names only
/// when close() returned; without it nothing is left.
class TfrecordShards {
 public:
  explicit TfrecordShards(const std::string& folder, int64_t shards = 128);
  ~TfrecordShards();
  /// One record: its features.
  void add(const std::map<std::string, HostArray>& arrays);
  void close();

 private:
  std::string folder_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<FileWriter>> writers_;
  int64_t count_ = 0;
};

}  // namespace md
