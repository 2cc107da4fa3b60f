// Trains your own model on your own batches: a small network is fitted to y = sin(3x). The loop adds checkpoints,
// resume, metrics and a loss curve; nothing here is specific to diffusion.
//   train_your_own FOLDER
#include <maxdiffusion/maxdiffusion.h>

#include <cmath>
#include <cstdio>

namespace {

using md::Tensor;

/// x: [B, 1] → [B, 1].
Tensor network(const md::Scope& s, Tensor x) {
  Tensor h = md::tanh(md::nn::linear(s / "hidden", x, {.out = 64, .init = md::init::normal(2)}));
  return md::nn::linear(s / "out", h, {.out = 1});
}

struct Regression : md::Task {
  std::string model() const override { return "network"; }
  std::vector<md::BatchField> batch() const override {
    return {{"x", {md::DType::f32, {64, 1}}}, {"y", {md::DType::f32, {64, 1}}}};
  }
  Tensor loss(const md::Models& models, const md::Feed& feed, md::Rng) const override {
    return md::mean(md::square(network(models("network"), feed.at("x")) - feed.at("y")));
  }
};

/// 1024 points of the function.
md::HostArrays points() {
  md::HostArray x(md::Shape{md::DType::f32, {1024, 1}}), y(x.shape());
  for (size_t i = 0; i < 1024; ++i) {
    x.mutable_view<float>()[i] = static_cast<float>(i) / 512 - 1;
    y.mutable_view<float>()[i] = std::sin(3 * x.view<float>()[i]);
  }
  return {{"x", x}, {"y", y}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]), 2;
  try {
    const md::Devices devices = md::Devices::open("cpu");
    const Regression task;
    md::LoopOptions o;
    o.title = "regression";
    o.folder = argv[1];  // with the same folder again the run resumes
    o.step.optim.learning_rate = 0.01;
    o.step.optim.max_train_steps = 3000;
    o.step.optim.optimizer_arg<double>("adam_weight_decay") = 0;
    o.step.optim.lr_scheduler = "cosine";
    o.initial = [](const md::ParamTable& params) {
      return [&params] {
        md::NamedShards values;
        for (const md::Param& p : params.params()) values[p.input] = md::initial_value(p, 0);
        return values;
      };
    };
    const md::Trained trained = md::train_loop(devices, {&task}, md::in_memory(points(), 64, 0), o);

    md::Graph g(devices.graph_options());  // the trained network at x = 0.5
    md::ParamTable params;
    g.output("y", network(md::Scope(g, params, "network"), md::full(g, 0.5, {md::DType::f32, {1, 1}})));
    std::vector<md::HostArray> inputs;
    for (const md::GraphInput& input : g.inputs()) inputs.push_back(trained.values.at(input.name));
    const double y = md::evaluate(devices, g, inputs)[0].to_doubles()[0];
    std::printf("after %d steps: y(0.5) = %.2f, sin(1.5) = %.2f\n", static_cast<int>(trained.steps), y, std::sin(1.5));
    return 0;
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "error: %s\n", e.what()), 1;
  }
}
