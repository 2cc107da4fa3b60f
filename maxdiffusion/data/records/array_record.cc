// ArrayRecord files, MaxDiffusion's dataset_type `grain`: chunks of records in Riegeli's container, and an index of the
// chunks at the end. Source: Riegeli's "records file format" and array_record's layout.proto.
#include <highwayhash/c_bindings.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/records/array_record.pb.h"
#include "maxdiffusion/data/records/arrow_library.h"
#include "maxdiffusion/data/records/kinds.h"

namespace md {
namespace {

constexpr int64_t kBlock = 1 << 16, kBlockHeader = 24, kChunkHeader = 40;
constexpr uint64_t kMagic = 0x71930e704fdae05e;
constexpr size_t kChunksHeld = 16;

uint64_t hash_of(std::string_view bytes) {
  static constexpr HHKey kKey = {0x2f696c6567656952, 0x0a7364726f636572, 0x2f696c6567656952, 0x0a7364726f636572};
  return HighwayHash64(kKey, bytes.data(), bytes.size());
}

/// Decoded records of a chunk.
struct Chunk {
  std::string values;
  std::vector<size_t> ends;
  std::string_view record(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::string_view(values).substr(begin, ends[i] - begin);
  }
};

class File {
 public:
  explicit File(const FoundFile& file) : in_(open_input(file)) {
    check(in_->size() >= kBlock, Code::io, "{}: {} bytes; an ArrayRecord file has at least {}", name(), in_->size(),
          kBlock);
    array_record::Postscript end;
    const auto last = read_chunk(in_->size() - kBlock);
    check(!last->ends.empty() && parse(end, last->record(0)) && end.magic() == kMagic, Code::io,
          "{}: not an ArrayRecord file", name());
    const auto footer = read_chunk(static_cast<int64_t>(end.footer_offset()));
    array_record::FooterMetadata about;
    check(!footer->ends.empty() && parse(about, footer->record(0)), Code::io, "{}: its index is damaged", name());
    const auto& a = about.array_record_metadata();
    check(a.version() == 1, Code::io, "{}: ArrayRecord version {}; expected 1", name(), a.version());
    check(a.num_chunks() + 1 == footer->ends.size(), Code::io, "{}: its index has {} chunks; expected {}", name(),
          footer->ends.size() - 1, a.num_chunks());
    int64_t records = 0;
    for (size_t i = 1; i < footer->ends.size(); ++i) {
      array_record::Footer f;
      check(parse(f, footer->record(i)), Code::io, "{}: its index is damaged", name());
      chunks.push_back({static_cast<int64_t>(f.chunk_offset()), records});
      records += static_cast<int64_t>(f.num_records());
    }
    check(records == static_cast<int64_t>(a.num_records()), Code::io, "{}: {} records in its index; expected {}",
          name(), records, a.num_records());
    size = records;
  }
  const std::string& name() const { return in_->name(); }

  std::shared_ptr<const Chunk> read_chunk(int64_t at) const {
    const std::string header = gather(at, kChunkHeader);
    const auto number = [&](size_t where) {
      uint64_t v;
      std::memcpy(&v, header.data() + where, sizeof v);
      return v;
    };
    check(number(0) == hash_of(std::string_view(header).substr(8)), Code::io,
          "{}: the chunk at byte {} is damaged: the checksum of its header is wrong", name(), at);
    const uint64_t data_size = number(8), records = number(24) >> 8, decoded = number(32);
    const char type = header[24];
    check(type != 't', Code::io, "{}: written with transpose:true; expected transpose:false", name());
    check(type == 'r', Code::io, "{}: the chunk at byte {} is of kind '{}'; expected records", name(), at, type);
    const std::string all =
        gather(at, kChunkHeader + static_cast<int64_t>(std::min<uint64_t>(data_size, INT64_MAX / 2)));
    std::string_view data = std::string_view(all).substr(kChunkHeader);
    check(number(16) == hash_of(data), Code::io, "{}: the chunk at byte {} is damaged: its checksum is wrong", name(),
          at);
    const auto damaged = [&](bool ok) {
      check(ok, Code::io, "{}: the chunk at byte {} cannot be decoded", name(), at);
    };
    damaged(!data.empty());
    const char compression = data[0];
    data.remove_prefix(1);
    const auto varint = [&](std::string_view& from) {
      uint64_t v = 0;
      for (int shift = 0;; shift += 7) {
        damaged(!from.empty() && shift < 64);
        const auto byte = static_cast<uint8_t>(from[0]);
        from.remove_prefix(1);
        v |= static_cast<uint64_t>(byte & 0x7f) << shift;
        if (byte < 0x80) return v;
      }
    };
    const auto decompressed = [&](std::string_view from) {
      if (compression == 0) return std::string(from);
      const char* codec = compression == 'z' ? "zstd" : compression == 'b' ? "brotli" : "snappy";
      damaged(compression == 'z' || compression == 'b' || compression == 's');
      const uint64_t bytes = varint(from);
      damaged(bytes <= decoded + 10 * records);
      return arrow_library().decompress(codec, from, static_cast<int64_t>(bytes));
    };
    const uint64_t sizes_size = varint(data);
    damaged(sizes_size <= data.size());
    const std::string sizes = decompressed(data.substr(0, sizes_size));
    auto chunk = std::make_shared<Chunk>();
    chunk->values = decompressed(data.substr(sizes_size));
    std::string_view left = sizes;
    uint64_t end = 0;
    for (uint64_t i = 0; i < records; ++i) {
      const uint64_t one = varint(left);
      damaged(one <= chunk->values.size() - end);
      chunk->ends.push_back(end += one);
    }
    damaged(left.empty() && end == chunk->values.size() && end == decoded);
    return chunk;
  }

  struct Place {
    int64_t at, first;  // byte offset; number of its first record in the file
  };
  std::vector<Place> chunks;
  int64_t size = 0;

 private:
  template <class Message>
  static bool parse(Message& m, std::string_view bytes) {
    return m.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  }
  /// `size` bytes from `at` without the headers that interrupt them at every block.
  std::string gather(int64_t at, int64_t size) const {
    check(at >= 0 && at < in_->size() && size <= in_->size() - at, Code::io,
          "{}: the file is truncated: a chunk of {} bytes at byte {} of {}", name(), size, at, in_->size());
    const int64_t most = std::min(in_->size() - at, size + kBlockHeader * (size / (kBlock - kBlockHeader) + 2));
    const Blob raw = in_->read(at, most);
    std::string out;
    out.reserve(static_cast<size_t>(size));
    for (int64_t p = 0; static_cast<int64_t>(out.size()) < size;) {
      const int64_t in_block = (at + p) % kBlock;
      if (in_block == 0) p += kBlockHeader;
      const int64_t n =
          std::min(size - static_cast<int64_t>(out.size()), kBlock - std::max(in_block, (at + p) % kBlock));
      check(p + n <= most, Code::io, "{}: the file is truncated in the chunk at byte {}", name(), at);
      out += raw.bytes.substr(static_cast<size_t>(p), static_cast<size_t>(n));
      p += n;
    }
    return out;
  }
  std::shared_ptr<const InputFile> in_;
};

class ArrayRecords : public RecordSource {
 public:
  ArrayRecords(const Files& files, const DataSourceConfig& config)
      : RecordSource(files_summary(files), fingerprint_of(files) + columns_key(config),
                     {.files = names_and_sizes(files)}),
        config_(config),
        files_(files.size()) {
    parallel_for(static_cast<int64_t>(files.size()), [&](int64_t i, int) {
      files_[static_cast<size_t>(i)] = std::make_unique<File>(files[static_cast<size_t>(i)]);
    });
    for (size_t i = 0; i < files_.size(); ++i) {
      const auto& f = files_[i];
      check_declared_count(f->size, files[i], "records");
      first_.push_back(size_);
      size_ += f->size;
    }
  }
  int64_t size() const override { return size_; }
  Record read(int64_t index) const override {
    const auto f = static_cast<size_t>(std::ranges::upper_bound(first_, index) - first_.begin() - 1);
    const File& file = *files_[f];
    const int64_t in_file = index - first_[f];
    const auto place = std::ranges::upper_bound(file.chunks, in_file, {}, &File::Place::first) - 1;
    const auto chunk = chunk_of(file, place->at);
    const auto k = static_cast<size_t>(in_file - place->first);
    const std::string name = fmt::format("{} record {}", file.name(), in_file);
    check(k < chunk->ends.size(), Code::io, "{}: its chunk has {} records", name, chunk->ends.size());
    return record_of_example(chunk->record(k), config_, name);
  }

 private:
  std::shared_ptr<const Chunk> chunk_of(const File& file, int64_t at) const {
    {
      const std::lock_guard lock(mutex_);
      for (const DecodedChunk& h : decoded_) {
        if (h.file == &file && h.at == at) return h.chunk;
      }
    }
    auto chunk = file.read_chunk(at);
    const std::lock_guard lock(mutex_);
    decoded_.push_front({&file, at, chunk});
    if (decoded_.size() > kChunksHeld) decoded_.pop_back();
    return chunk;
  }
  struct DecodedChunk {
    const File* file;
    int64_t at;
    std::shared_ptr<const Chunk> chunk;
  };
  DataSourceConfig config_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<int64_t> first_;
  int64_t size_ = 0;
  mutable std::mutex mutex_;
  mutable std::deque<DecodedChunk> decoded_;  // the chunks decoded most recently
};

}  // namespace

SourcePtr grain_source(const std::string& where, const DataSourceConfig& config) {
  return std::make_shared<ArrayRecords>(list_inputs(where), config);
}

}  // namespace md
