#include "maxdiffusion/run/folder_samples.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"

namespace md {
namespace {

class FolderSamples final : public Examples {
 public:
  FolderSamples(const std::shared_ptr<const CachedSamples>& cache, std::shared_ptr<const DataFolders> folders,
                const ImageConfig& images, FolderText text)
      : folders_(std::move(folders)), images_(images), text_(std::move(text)) {
    for (const ImageConfig& config : images_.folders) cached_.push_back(cached_examples(cache, config));
    for (int64_t i = 0; i < cache->size(); ++i) records_.push_back(cache->record(i));
    for (size_t i = 0; i < records_.size(); ++i)
      samples_.insert(samples_.end(), static_cast<size_t>(folders_->repeats(records_[i])), static_cast<int64_t>(i));
  }
  int64_t size() const override { return std::ssize(samples_); }
  HostArrays read(const ExampleRef& which) const override {
    const int64_t sample = samples_[static_cast<size_t>(which.index)];
    const int64_t record = records_[static_cast<size_t>(sample)], folder = folders_->folder(record);
    HostArrays out = cached_[static_cast<size_t>(folder)]->read({sample, which.bits});
    const ImageConfig& config = images_.of_folder(folder);
    if (text_.fields) {
      const Record caption{.name = folders_->folders()[static_cast<size_t>(folder)].where,
                           .caption = folders_->caption(record)};
      for (const auto& [name, a] : text_.fields(caption_of(caption, config, which.bits))) out[name] = without_batch(a);
    } else if (drops_caption(config.captions, which.bits)) {
      for (const auto& [name, a] : text_.empty) out[name] = without_batch(a);
    }
    return out;
  }

 private:
  std::shared_ptr<const DataFolders> folders_;
  ImageConfig images_;
  FolderText text_;
  std::vector<std::shared_ptr<const Examples>> cached_;  // by folder
  std::vector<int64_t> records_;                         // records of the cached samples
  std::vector<int64_t> samples_;                         // indices of cached samples, with repeats
};

}  // namespace

ImagesInBuckets repeated(ImagesInBuckets images, const DataFolders& folders) {
  for (std::vector<int64_t>& records : images.records) {
    std::vector<int64_t> all;
    for (int64_t record : records) all.insert(all.end(), static_cast<size_t>(folders.repeats(record)), record);
    records = std::move(all);
  }
  return images;
}

std::shared_ptr<const Examples> folder_samples(const std::shared_ptr<const CachedSamples>& cache,
                                               std::shared_ptr<const DataFolders> folders, const ImageConfig& images,
                                               FolderText text) {
  return std::make_shared<FolderSamples>(cache, std::move(folders), images, std::move(text));
}

}  // namespace md
