// gs:// and s3:// through Arrow's file systems.
#include <arrow/filesystem/filesystem.h>
#include <arrow/util/compression.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "maxdiffusion/data/arrow/part.h"

namespace md {
namespace {

namespace afs = arrow::fs;

struct Opened {
  std::shared_ptr<afs::FileSystem> system;
  std::string path;  // within it
};

// One file system for each bucket and its options; connections are kept between calls.
Opened open_system(const std::string& uri, const std::string& libraries) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<afs::FileSystem>> systems;
  const std::lock_guard lock(mutex);
  if (systems.empty())
    std::atexit([] {
      systems.clear();
      afs::EnsureFinalized();
    });
  if (static bool loaded = false; uri.starts_with("s3://") && !loaded) {
    require(afs::LoadFileSystemFactories((libraries + "/libarrow_s3.so.2600").c_str()), libraries);
    loaded = true;
  }
  const auto [path, query] = parts_of(uri);
  const size_t user = path.find("://") + 3, slash = path.find('/', user);
  const std::string key = path.substr(0, slash) + query;
  Opened o;
  if (const auto it = systems.find(key); it != systems.end()) {
    const size_t at = path.find('@', user);
    o.system = it->second;
    o.path = path.substr(at < slash ? at + 1 : user);
    while (o.path.ends_with('/')) o.path.pop_back();
    return o;
  }
  o.system = require(afs::FileSystemFromUri(uri, &o.path), shown(uri));
  systems.emplace(key, o.system);
  return o;
}

class RemoteFile : public InputFile {
 public:
  RemoteFile(std::string name, std::shared_ptr<arrow::io::RandomAccessFile> file)
      : name_(std::move(name)), file_(std::move(file)), size_(require(file_->GetSize(), name_)) {}
  const std::string& name() const override { return name_; }
  int64_t size() const override { return size_; }
  Blob read(int64_t offset, int64_t size) const override {
    check(offset >= 0 && size >= 0 && offset <= size_ && size <= size_ - offset, Code::io,
          "{}: the file is truncated: bytes {} to {} of {} are asked for", name_, offset, offset + size, size_);
    auto buffer = require(file_->ReadAt(offset, size), name_);
    check(buffer->size() == size, Code::io, "{}: {} bytes at {} were read of {}", name_, buffer->size(), offset, size);
    return blob(std::move(buffer));
  }
  bool local() const override { return false; }

 private:
  std::string name_;
  std::shared_ptr<arrow::io::RandomAccessFile> file_;
  int64_t size_;
};

}  // namespace

std::shared_ptr<const InputFile> open_remote(const std::string& uri, const std::string& libraries) {
  const Opened o = open_system(uri, libraries);
  return std::make_shared<RemoteFile>(shown(uri), require(o.system->OpenInputFile(o.path), shown(uri)));
}

std::vector<FoundFile> list_remote(const std::string& uri, const std::string& libraries) {
  const Opened o = open_system(uri, libraries);
  const auto describe = [&](const afs::FileInfo& i) {
    const size_t from = std::min(o.path.size() + 1, i.path().size());
    const auto time = i.mtime() == afs::kNoTime ? 0 : i.mtime().time_since_epoch().count();
    return FoundFile{i.path().substr(from), i.size(), time};
  };
  const afs::FileInfo info = require(o.system->GetFileInfo(o.path), shown(uri));
  if (info.type() == afs::FileType::NotFound) return {};
  if (info.IsFile()) return {describe(info)};
  afs::FileSelector below;
  below.base_dir = o.path;
  below.recursive = true;
  std::vector<FoundFile> found;
  for (const afs::FileInfo& i : require(o.system->GetFileInfo(below), shown(uri))) {
    if (i.IsFile()) found.push_back(describe(i));
  }
  return found;
}

namespace {

class Part : public ArrowPart {
 public:
  explicit Part(std::string libraries) : libraries_(std::move(libraries)) {}
  std::shared_ptr<const InputFile> open(const std::string& uri) const override { return open_remote(uri, libraries_); }
  std::vector<FoundFile> list(const std::string& uri) const override { return list_remote(uri, libraries_); }
  std::shared_ptr<const Table> open_table(std::shared_ptr<const InputFile> file) const override {
    return open_table_file(std::move(file));
  }
  std::string decompress(const std::string& codec, std::string_view bytes, int64_t size) const override {
    const auto type = require(arrow::util::Codec::GetCompressionType(codec), codec);
    auto c = require(arrow::util::Codec::Create(type), codec);
    std::string out(static_cast<size_t>(size), '\0');
    const int64_t n =
        require(c->Decompress(static_cast<int64_t>(bytes.size()), reinterpret_cast<const uint8_t*>(bytes.data()), size,
                              reinterpret_cast<uint8_t*>(out.data())),
                codec);
    check(n == size, Code::io, "{}: {} bytes came out; expected {}", codec, n, size);
    return out;
  }

 private:
  std::string libraries_;
};

}  // namespace
}  // namespace md

extern "C" const md::ArrowPart* md_arrow_part(const char* libraries) { return new md::Part(libraries); }
