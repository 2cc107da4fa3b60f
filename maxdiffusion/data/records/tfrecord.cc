// TFRecord files of tf.Examples, each a shard.
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/sequential.h"
#include "maxdiffusion/storage/tfrecord.h"

namespace md {
namespace {

template <class T>
T number(std::string_view bytes, size_t at) {
  T v;
  std::memcpy(&v, bytes.data() + at, sizeof v);
  return v;
}

class TfrecordReader : public ShardReader {
 public:
  TfrecordReader(std::shared_ptr<const InputFile> file, int64_t offset, std::shared_ptr<const DataSourceConfig> config)
      : in_(std::move(file), offset), config_(std::move(config)) {}

  std::optional<PendingRecord> next() override {
    if (in_.remaining() == 0) return std::nullopt;
    const int64_t at = in_.position();
    const std::string name = fmt::format("{} record at byte {}", in_.file().name(), at);
    const auto needs = [&](int64_t bytes) {
      check(bytes >= 0 && bytes <= in_.remaining(), Code::io, "{}: the file is truncated: {} bytes are left of {}",
            name, in_.remaining(), bytes);
    };
    needs(static_cast<int64_t>(kTfrecordHead));
    const Blob head = in_.read(static_cast<int64_t>(kTfrecordHead));
    if (number<uint32_t>(head.bytes, 8) != masked_crc32c(head.bytes.substr(0, 8))) {
      const bool gzip = at == 0 && head.bytes.starts_with("\x1f\x8b");
      fail(Code::io, "{}: {}", name,
           gzip      ? "the file is gzipped; write it without compression"
           : at == 0 ? "not a TFRecord file, or its first length is damaged"
                     : "the checksum of its length is wrong");
    }
    const auto size = number<uint64_t>(head.bytes, 0);
    check(size < uint64_t{1} << 40, Code::io, "{}: declares {} bytes", name, size);
    needs(static_cast<int64_t>(size + kTfrecordFoot));
    const Blob body = in_.read(static_cast<int64_t>(size));
    const auto expected = number<uint32_t>(in_.read(static_cast<int64_t>(kTfrecordFoot)).bytes, 0);
    return [body, name, expected, config = config_] {
      check(masked_crc32c(body.bytes) == expected, Code::io, "{}: its checksum is wrong: the file is damaged", name);
      return record_of_example(body.bytes, *config, name);
    };
  }
  int64_t offset() const override { return in_.position(); }

 private:
  SequentialReader in_;
  std::shared_ptr<const DataSourceConfig> config_;
};

class Tfrecords : public RecordSource {
 public:
  Tfrecords(const Files& files, const DataSourceConfig& config)
      : RecordSource(files_summary(files), fingerprint_of(files) + columns_key(config),
                     {.files = names_and_sizes(files)}),
        files_(files),
        config_(std::make_shared<const DataSourceConfig>(config)) {}
  int64_t size() const override { return -1; }
  int64_t shards() const override { return static_cast<int64_t>(files_.size()); }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    return std::make_unique<TfrecordReader>(open_input(files_[static_cast<size_t>(shard)]), offset, config_);
  }

 private:
  Files files_;
  std::shared_ptr<const DataSourceConfig> config_;
};

}  // namespace

SourcePtr tfrecord_source(const std::string& where, const DataSourceConfig& config) {
  return std::make_shared<Tfrecords>(list_inputs(where), config);
}

}  // namespace md
