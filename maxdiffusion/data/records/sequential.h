// Reads a file from front to back: in place if it is local, else in ranges of several megabytes.
#pragma once

#include <algorithm>
#include <memory>

#include "maxdiffusion/storage/storage.h"

namespace md {

class SequentialReader {
 public:
  SequentialReader(std::shared_ptr<const InputFile> file, int64_t offset) : file_(std::move(file)), offset_(offset) {}
  const InputFile& file() const { return *file_; }
  int64_t position() const { return offset_; }
  int64_t remaining() const { return file_->size() - offset_; }
  /// The next `size` bytes. Throws io, naming the file, if fewer remain.
  Blob read(int64_t size) {
    Blob b = peek(size);
    offset_ += size;
    return b;
  }
  Blob peek(int64_t size) {
    if (file_->local() || size > remaining()) return file_->read(offset_, size);
    if (offset_ < begin_ || offset_ + size > begin_ + static_cast<int64_t>(range_.bytes.size())) {
      range_ = file_->read(offset_, std::max(size, std::min(kRange, remaining())));
      begin_ = offset_;
    }
    return {range_.owner, range_.bytes.substr(static_cast<size_t>(offset_ - begin_), static_cast<size_t>(size))};
  }
  void skip(int64_t size) { offset_ += size; }

 private:
  static constexpr int64_t kRange = 4 << 20;
  std::shared_ptr<const InputFile> file_;
  int64_t offset_, begin_ = 0;
  Blob range_;
};

}  // namespace md
