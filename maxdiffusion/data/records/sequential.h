// A file read from front to back: in place where it is local, else by ranges of several megabytes.
#pragma once

#include <algorithm>
#include <memory>

#include "maxdiffusion/storage/storage.h"

namespace md {

class SequentialReader {
 public:
  SequentialReader(std::shared_ptr<const InputFile> file, int64_t at) : file_(std::move(file)), at_(at) {}
  const InputFile& file() const { return *file_; }
  int64_t position() const { return at_; }
  int64_t remaining() const { return file_->size() - at_; }
  /// The next `size` bytes. Throws io, naming the file, when it ends before.
  Blob read(int64_t size) {
    Blob b = peek(size);
    at_ += size;
    return b;
  }
  Blob peek(int64_t size) {
    if (file_->local() || size > remaining()) return file_->read(at_, size);
    if (at_ < begin_ || at_ + size > begin_ + static_cast<int64_t>(range_.bytes.size())) {
      range_ = file_->read(at_, std::max(size, std::min(kRange, remaining())));
      begin_ = at_;
    }
    return {range_.owner, range_.bytes.substr(static_cast<size_t>(at_ - begin_), static_cast<size_t>(size))};
  }
  void skip(int64_t size) { at_ += size; }

 private:
  static constexpr int64_t kRange = 4 << 20;
  std::shared_ptr<const InputFile> file_;
  int64_t at_, begin_ = 0;
  Blob range_;
};

}  // namespace md
