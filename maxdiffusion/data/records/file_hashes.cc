#include "maxdiffusion/data/records/file_hashes.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

// The first line: this, and a hash of the lines after it, each "HASH KEY".
constexpr const char* kHeader = "hashes of files 1 ";

}  // namespace

FileHashes::FileHashes(std::string place) : place_(std::move(place)) {
  if (place_.empty() || !find_file(place_)) return;
  const std::string text = get_text(place_), first = kHeader;
  const size_t end = text.find('\n');
  if (!text.starts_with(first) || end == text.npos ||
      text.substr(first.size(), end - first.size()) != content_hash(std::string_view(text).substr(end + 1)))
    return;
  for (size_t at = end + 1; at < text.size();) {
    const size_t line = text.find('\n', at), space = text.find(' ', at);
    if (line == text.npos || space > line) break;
    known_.emplace(text.substr(space + 1, line - space - 1), text.substr(at, space - at));
    at = line + 1;
  }
}

std::string FileHashes::of(const std::string& key, const std::function<std::string()>& compute) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = requested_.find(key); found != requested_.end()) return found->second;
    if (const auto found = known_.find(key); found != known_.end()) return requested_[key] = found->second;
  }
  std::string hash = compute();
  ++computed_;
  const std::lock_guard lock(mutex_);
  requested_[key] = hash;
  return hash;
}

std::string FileHashes::of(const FoundFile& file) {
  FoundFile found = file;
  const bool unlisted = found.size < 0 || found.modified == 0;
  if (unlisted || (found.changed == 0 && !is_remote(found.location)))
    if (const auto listed = find_file(file.location)) found = *listed;
  std::string key = fmt::format("{} {} {} {}", found.size, found.modified, found.changed, found.location);
  std::ranges::replace(key, '\n', ' ');
  return of(key, [&] {
    const auto input = open_input(found);
    return content_hash(input->read(0, input->size()).bytes);
  });
}

void FileHashes::save() const {
  if (place_.empty() || requested_ == known_) return;
  std::vector<std::string> lines;
  for (const auto& [key, hash] : requested_) lines.push_back(hash + " " + key + "\n");
  std::ranges::sort(lines);
  const std::string text = fmt::format("{}", fmt::join(lines, ""));
  put_text(place_, fmt::format("{}{}\n{}", kHeader, content_hash(text), text));
}

std::string media_hash(const std::vector<std::string>& images, const std::vector<std::string>& references,
                       const std::string& mask, const std::optional<CropBox>& box) {
  std::string all = fmt::format("{} from {}", fmt::join(images, " "), fmt::join(references, " "));
  if (!mask.empty()) all += " mask " + mask;
  if (box) all += fmt::format(" box {} {} {} {}", box->left, box->top, box->width, box->height);
  return content_hash(all);
}

RecordContent content_of(const Record& r) {
  RecordContent out{.name = r.name, .media = "", .caption = r.caption, .folder = r.folder, .fault = r.fault};
  if (!r.fault.empty()) return out;
  const auto hash = [](const Blob& b) { return content_hash(b.bytes); };
  std::vector<std::string> images, references;
  if (r.pixels)
    images.push_back(fmt::format("{} {}", to_string(r.pixels.shape()),
                                 content_hash({reinterpret_cast<const char*>(r.pixels.data()), r.pixels.bytes()})));
  else if (r.frames.empty())
    images.push_back(hash(r.image));
  for (const Blob& frame : r.frames) images.push_back(hash(frame));
  for (const Blob& reference : r.references) references.push_back(hash(reference));
  out.media = media_hash(images, references, r.mask.bytes.empty() ? "" : hash(r.mask), r.box);
  return out;
}

RecordContent RecordSource::content(int64_t index, FileHashes&) const { return content_of(read(index)); }

}  // namespace md
