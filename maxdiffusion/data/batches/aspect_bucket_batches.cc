#include "maxdiffusion/data/batches/aspect_bucket_batches.h"

#include <algorithm>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {

AspectBucketOrder::AspectBucketOrder(std::vector<int64_t> counts, int64_t batch, const StreamConfig& config)
    : counts_(std::move(counts)), batch_(batch), config_(config) {
  check(batch > 0, Code::invalid_config, "batch size: {}; expected > 0", batch);
  check(!counts_.empty(), Code::internal, "buckets: there are none");
  for (int64_t n : counts_) check(n > 0, Code::internal, "buckets: one of {} is empty", counts_.size());
  mine_ = config.share.rows(batch);
}

int64_t AspectBucketOrder::size() const { return std::accumulate(counts_.begin(), counts_.end(), int64_t{0}); }

void AspectBucketOrder::plan(int64_t epoch) {
  if (epoch == planned_) return;
  std::vector<std::pair<size_t, int64_t>> all;
  for (size_t b = 0; b < counts_.size(); ++b)
    for (int64_t k = epoch * counts_[b] / batch_; k < (epoch + 1) * counts_[b] / batch_; ++k) all.emplace_back(b, k);
  batches_.clear();
  for (int64_t i : order_of(static_cast<int64_t>(all.size()), mix(~config_.seed), epoch, config_.shuffle))
    batches_.push_back(all[static_cast<size_t>(i)]);
  orders_.clear();
  planned_ = epoch;
}

AspectBucketOrder::Choice AspectBucketOrder::next() {
  for (plan(at_.epoch); at_.index == static_cast<int64_t>(batches_.size()) * batch_; plan(at_.epoch))
    at_ = {.epoch = at_.epoch + 1};
  const auto [bucket, number] = batches_[static_cast<size_t>(at_.index / batch_)];
  at_.index += batch_;
  const int64_t count = counts_[bucket];
  const uint64_t seed = mix(config_.seed) ^ static_cast<uint64_t>(bucket + 1);
  Choice out{bucket, {}};
  for (int64_t row : mine_) {
    const int64_t s = number * batch_ + row, epoch = s / count, i = s % count;
    std::vector<int64_t>& order = orders_[{bucket, epoch}];
    if (order.empty()) order = order_of(count, seed, epoch, config_.shuffle);
    out.samples.push_back({order[static_cast<size_t>(i)], bits_of_sample(seed, epoch, i)});
  }
  return out;
}

bool AspectBucketOrder::seek(Position p) {
  check_position(p);
  plan(p.epoch);
  const bool exists = p == Position{.epoch = p.epoch, .index = p.index} && p.index % batch_ == 0 &&
                      p.index <= static_cast<int64_t>(batches_.size()) * batch_;
  at_ = exists ? p : next_epoch(p);
  return exists;
}

std::unique_ptr<Dataset> examples_in_aspect_buckets(std::vector<std::shared_ptr<const Examples>> buckets, int64_t batch,
                                                    const StreamConfig& config) {
  class InBuckets final : public Dataset {
   public:
    InBuckets(std::vector<std::shared_ptr<const Examples>> buckets, const std::vector<int64_t>& counts, int64_t batch,
              const StreamConfig& config)
        : buckets_(std::move(buckets)), order_(counts, batch, config) {}
    Batch next() override {
      const AspectBucketOrder::Choice choice = order_.next();
      return batch_of(*buckets_[choice.bucket], choice.samples);
    }
    Position position() const override { return order_.position(); }
    bool seek(Position p) override { return order_.seek(p); }
    int64_t size() const override { return order_.size(); }

   private:
    std::vector<std::shared_ptr<const Examples>> buckets_;
    AspectBucketOrder order_;
  };
  std::vector<int64_t> counts;
  counts.reserve(buckets.size());
  for (const auto& b : buckets) counts.push_back(b->size());
  return std::make_unique<InBuckets>(std::move(buckets), counts, batch, config);
}

std::unique_ptr<Dataset> in_aspect_buckets(std::vector<Batch> buckets, int64_t batch, const StreamConfig& config) {
  std::vector<std::shared_ptr<const Examples>> all;
  all.reserve(buckets.size());
  for (Batch& b : buckets) all.push_back(examples_in_memory(std::move(b)));
  return examples_in_aspect_buckets(std::move(all), batch, config);
}

void log_aspect_buckets(const std::vector<ImageSize>& sizes, const std::vector<int64_t>& images, int64_t batch) {
  const bool clips = std::ranges::any_of(sizes, [](const ImageSize& s) { return s.frames > 1; });
  for (size_t i = 0; i < sizes.size(); ++i) {
    // Next to clips an image is of one frame.
    const std::string bucket = "bucket " + to_string(sizes[i]) + (clips && sizes[i].frames == 1 ? "x1" : "");
    log_info("{}: {} {}", bucket, images[i], sizes[i].frames > 1 ? "clips" : "images");
    if (images[i] < batch)
      log_warning("{}: {} samples, fewer than a batch of {}: one batch every {:.3g} epochs, with repeats", bucket,
                  images[i], batch, static_cast<double>(batch) / static_cast<double>(images[i]));
  }
}

}  // namespace md
