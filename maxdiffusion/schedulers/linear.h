// Samplers whose step is a sum: the new sample and the carried arrays are linear in the sample, the model's output, the
// clipped x0, the carried arrays, and Gaussian noise. A sampler is therefore only a plan: on the host, in double, it
// writes its update as linear forms (below). Their coefficients become rows of a table; one graph step, shared by all
// samplers, computes the linear combination of its row.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <valarray>

#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// A linear form: coefficients of a step's inputs. Forms add, subtract and scale as arrays do.
using Form = std::valarray<double>;

/// Inputs of a step, and the index of the first step that runs: there is no history from earlier ones. `clipped` is
/// LinearStep::x0 within ±clip; empty if the sampler does not clip.
struct Knowns {
  Form sample, output, clipped;
  std::vector<Form> history;
  int64_t first = 0;
  /// Steps that ran before step `i`.
  size_t before(size_t i) const { return i - std::min(i, static_cast<size_t>(first)); }
};

struct LinearStep {
  NoiseLevel level;        // of the step's input sample
  double input_scale = 1;  // model input = sample × this
  Form x0;                 // the form that is clipped, of sample and output only; empty without clip
  std::vector<Form> next;  // the new sample, then the carried arrays, which are zeros initially
  double noise = 0;        // standard deviation of the noise added to the new sample
  /// The level of the new sample if it is exactly signal·x0 + noise·ε, both as predicted by the model; else absent.
  std::optional<NoiseLevel> reaches = {};
};

struct LinearPlan {
  std::vector<double> timesteps;  // the model's input
  std::vector<LinearStep> steps;  // one per timestep
  double init_noise_sigma = 1;
  int64_t calls = 1;  // model calls per step, except the last step
  /// Timesteps of training of the same levels, where the model gets something else; empty: `timesteps`.
  std::vector<double> training_timesteps = {};
};

/// Dynamic thresholding (Saharia et al. 2022, section 2.3): x0 is clipped to ± the quantile `ratio` of its sizes in
/// each sample, which is at least 1 and at most `most`, and divided by it.
struct Threshold {
  double ratio = 0.995, most = 1;
};

struct LinearSampler {
  std::string name;
  int64_t history = 0;
  double clip = 0;                          // > 0: x0 is clipped to ±clip
  std::optional<Threshold> threshold = {};  // in place of `clip`
  bool stochastic = false;                  // LinearStep::noise is used
  std::function<LinearPlan(int64_t steps, const Knowns&)> plan;
  bool clips() const { return clip > 0 || threshold; }
};

/// Columns of its table: input_scale; with clip, x0's coefficients of sample and output; the coefficients of each of
/// `next` for sample, output, clipped x0 (with clip), history; if stochastic, noise. Arithmetic is f32.
std::unique_ptr<Scheduler> linear_sampler(LinearSampler sampler);

/// ᾱ for formulas that divide by √ᾱ_T, which is 0 under zero terminal SNR: then 2^−24, as in diffusers.
inline double divisible(double alpha_bar) { return alpha_bar > 0 ? alpha_bar : 0x1p-24; }

/// The level of samples √ᾱ·x0 + √(1 − ᾱ)·ε.
NoiseLevel level_of(double alpha_bar);

/// x0 and ε, if the sample is α·x0 + σ·ε and the model predicts `prediction_type`: epsilon, v_prediction (α·ε − σ·x0),
/// sample, or, for x0 only, flow_prediction (ε − x0, where α = 1 − σ).
Form predicted_x0(const std::string& prediction_type, double alpha, double sigma, const Knowns& k);
Form predicted_noise(const std::string& prediction_type, double alpha, double sigma, const Knowns& k);

}  // namespace md
