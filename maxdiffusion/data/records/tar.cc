// WebDataset: tar files, each a shard. Members whose paths are equal up to the first dot of the file name form one
// record: an image (image_endings()) and its caption (.txt, or a key of .json). Other members, and those
// whose names start with a dot, are ignored.
// Tar as POSIX ustar, with pax and GNU long names. Source: POSIX pax, "ustar Interchange Format"; GNU tar manual.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/sequential.h"

namespace md {
namespace {

constexpr int64_t kBlock = 512;

struct Member {
  int64_t at = 0;  // offset of its first header
  std::string name;
  Blob content;
};

class TarReader {
 public:
  TarReader(std::shared_ptr<const InputFile> file, int64_t offset) : in_(std::move(file), offset) {}
  const std::string& name() const { return in_.file().name(); }
  int64_t position() const { return in_.position(); }

  /// The next regular file; none at the end. offset() is then after it.
  std::optional<Member> next() {
    Member m{.at = in_.position()};
    std::string long_name;
    int64_t pax_size = -1;
    for (;;) {
      if (in_.remaining() == 0) {
        check(long_name.empty(), Code::io, "{}: the file is truncated at byte {}", name(), in_.position());
        return std::nullopt;
      }
      check(in_.remaining() >= kBlock, Code::io, "{}: the file is truncated: {} bytes are left of a header", name(),
            in_.remaining());
      const Blob header = in_.read(kBlock);
      if (header.bytes.find_first_not_of('\0') == std::string_view::npos) return std::nullopt;
      const auto field = [&](size_t at, size_t size) {
        const std::string_view f = header.bytes.substr(at, size);
        return std::string(f.substr(0, f.find('\0')));
      };
      int64_t sum = 0;
      for (size_t i = 0; i < header.bytes.size(); ++i)
        sum += i >= 148 && i < 156 ? ' ' : static_cast<uint8_t>(header.bytes[i]);
      check(sum == octal(header.bytes.substr(148, 8)), Code::io, "{}: not a tar file, or damaged at byte {}", name(),
            in_.position() - kBlock);
      const char type = header.bytes[156];
      int64_t size = octal(header.bytes.substr(124, 12));
      if (type != 'x' && type != 'g' && type != 'L' && type != 'K' && pax_size >= 0) size = pax_size;
      const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
      check(size >= 0 && size <= in_.remaining(), Code::io, "{}: the file is truncated: member '{}' of {} bytes has {}",
            name(), field(0, 100), size, in_.remaining());
      const Blob content = in_.read(size);
      in_.skip(std::min(padded - size, in_.remaining()));
      if (type == 'L') {
        long_name = std::string(content.bytes.substr(0, content.bytes.find('\0')));
      } else if (type == 'x') {
        read_pax(content.bytes, long_name, pax_size);
      } else if (type == '0' || type == '\0' || type == '7') {
        const bool ustar = header.bytes.substr(257, 5) == "ustar" && header.bytes[262] == '\0';
        const std::string prefix = ustar ? field(345, 155) : "";
        m.name = !long_name.empty() ? long_name : (prefix.empty() ? "" : prefix + "/") + field(0, 100);
        m.content = content;
        return m;
      } else if (type != 'g' && type != 'K') {  // folders and links are skipped
        long_name.clear(), pax_size = -1;
        m.at = in_.position();
      }
    }
  }

 private:
  int64_t octal(std::string_view f) const {
    int64_t v = 0;
    if (!f.empty() && (f[0] & '\x80')) {  // GNU: large numbers are binary
      for (size_t i = 1; i < f.size(); ++i) {
        check(v < int64_t{1} << 48, Code::io, "{}: a member's size is damaged near byte {}", name(), in_.position());
        v = v << 8 | static_cast<uint8_t>(f[i]);
      }
      return v;
    }
    for (char c : f) {
      if (c >= '0' && c <= '7') v = v * 8 + (c - '0');
    }
    return v;
  }
  /// Parses repeated "<length> <key>=<value>\n".
  void read_pax(std::string_view text, std::string& path, int64_t& size) const {
    while (!text.empty()) {
      const size_t blank = text.find(' '), equals = text.find('=');
      size_t length = 0;
      std::from_chars(text.data(), text.data() + std::min(blank, text.size()), length);
      check(blank != std::string_view::npos && equals != std::string_view::npos && blank < equals && equals < length &&
                length <= text.size(),
            Code::io, "{}: an extended header is damaged near byte {}", name(), in_.position());
      const std::string_view key = text.substr(blank + 1, equals - blank - 1);
      const std::string value(text.substr(equals + 1, length - equals - 2));
      if (key == "path") path = value;
      if (key == "size") std::from_chars(value.data(), value.data() + value.size(), size);
      text.remove_prefix(length);
    }
  }

  SequentialReader in_;
};

struct Split {
  std::string stem, extension;
};
Split split(const std::string& name) {
  const size_t slash = name.rfind('/'), dot = name.find('.', slash == std::string::npos ? 0 : slash + 1);
  if (dot == std::string::npos) return {name, ""};
  std::string e = name.substr(dot + 1);
  std::ranges::transform(e, e.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return {name.substr(0, dot), e};
}

/// Whether a folder or the name starts with a dot, as macOS' "._0001.png", or lies in its "__MACOSX": as in folders,
/// such files are not read.
bool is_hidden(const std::string& name) {
  for (const auto& part : std::filesystem::path(name))
    if (part == "__MACOSX" || (part.string().starts_with('.') && part != "." && part != "..")) return true;
  return false;
}

class Reader : public ShardReader {
 public:
  Reader(std::shared_ptr<const InputFile> file, int64_t offset, const DataSourceConfig& config)
      : tar_(std::move(file), offset), config_(config), ahead_(next_member()), end_(ahead_ ? ahead_->at : offset) {}

  std::optional<PendingRecord> next() override {
    if (!ahead_) return std::nullopt;
    const std::string stem = split(ahead_->name).stem;
    std::vector<Member> members;
    while (ahead_ && split(ahead_->name).stem == stem) {
      members.push_back(std::move(*ahead_));
      ahead_ = next_member();
    }
    end_ = ahead_ ? ahead_->at : tar_.position();
    return [members = std::move(members), name = tar_.name() + " " + stem, config = config_] {
      return record(members, name, config);
    };
  }
  int64_t offset() const override { return end_; }

 private:
  std::optional<Member> next_member() {
    for (;;)
      if (auto m = tar_.next(); !m || !is_hidden(m->name)) return m;
  }
  static Record record(const std::vector<Member>& members, const std::string& name, const DataSourceConfig& config) {
    Record r{.name = name};
    bool captioned = false;
    std::string found;
    for (const Member& m : members) {
      const std::string e = split(m.name).extension;
      found += (found.empty() ? "" : ", ") + e;
      const bool any_image = image_endings().contains("." + e);
      if (config.image_column == "image" ? any_image && !r.image.owner : e == config.image_column) r.image = m.content;
      if (e == (config.caption_column == "text" ? "txt" : config.caption_column)) {
        r.caption = trimmed(decoded_text(m.content.bytes, fmt::format("{}.{}", name, e)));
        captioned = true;
      }
    }
    for (const Member& m : members) {
      if (captioned || split(m.name).extension != "json") continue;
      const auto row = parse_json_or_discard(decoded_text(m.content.bytes, name + ".json"));
      check(row.is_object(), Code::io, "{}.json: not a JSON object", name);
      std::vector<std::string> keys;
      for (const auto& [key, value] : row.items()) keys.push_back(key);
      check(row.contains(config.caption_column), Code::io, "{}.json: no key '{}'; it has: {}", name,
            config.caption_column, joined(keys));
      const auto& value = row[config.caption_column];
      check(value.is_string() || value.is_null(), Code::io, "{}.json: '{}' must be a string", name,
            config.caption_column);
      r.caption = value.is_string() ? value.get<std::string>() : "";
    }
    if (!r.image.owner)
      r.fault = fmt::format("{}: no image; the record has: {}; expected the members of a sample next to each other",
                            name, found);
    for (const std::string& column : config.reference_columns()) {  // "source", of 0001.source.png
      const auto member = std::ranges::find_if(members, [&](const Member& m) {
        const std::string e = split(m.name).extension;
        return e == column || e.starts_with(column + ".");
      });
      if (member != members.end())
        r.references.push_back(member->content);
      else
        r.fault = fmt::format("{}: no '{}'; the record has: {}", name, column, found);
    }
    return r;
  }

  TarReader tar_;
  DataSourceConfig config_;
  std::optional<Member> ahead_;
  int64_t end_;
};

class Tars : public RecordSource {
 public:
  Tars(const Files& files, const DataSourceConfig& config)
      : RecordSource(files_summary(files), fingerprint_of(files) + columns_key(config),
                     {.files = names_and_sizes(files)}),
        files_(files),
        config_(config) {
    check(config.array_columns.empty(), Code::invalid_config,
          "dataset_type is webdataset, which holds images and captions; encoded samples are read from tfrecord, grain "
          "or hf");
  }
  int64_t size() const override { return -1; }
  int64_t shards() const override { return static_cast<int64_t>(files_.size()); }
  std::unique_ptr<ShardReader> open(int64_t shard, int64_t offset) const override {
    return std::make_unique<Reader>(open_input(files_[static_cast<size_t>(shard)]), offset, config_);
  }

 private:
  Files files_;
  DataSourceConfig config_;
};

}  // namespace

SourcePtr webdataset_source(const std::string& where, const DataSourceConfig& config) {
  const Files files = list_inputs(where);
  for (const FoundFile& f : files)
    if (has_ending(f, ".tar.gz .tgz .tar.bz2 .tar.xz .tar.zst"))
      throw Error(Code::io, fmt::format("'{}': a compressed tar file; expected .tar", shown(f.location)))
          .note("try: decompress it, as with gunzip; images are compressed already");
  Files tars;
  std::ranges::copy_if(files, std::back_inserter(tars), [](const FoundFile& f) { return has_ending(f, ".tar"); });
  check(!tars.empty(), Code::io, "'{}': no .tar file; the first of {} files is {}", shown(where), files.size(),
        shown(files[0].location));
  return std::make_shared<Tars>(tars, config);
}

}  // namespace md
