// `accelerator_check`: tests and measures a device, in one folder and within a time limit. Each step is a child
// process: this program's commands, the tests of bench/accelerator's manifest, PyTorch if it is installed. The manifest
// determines what is tested and timed: this file names no model.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/exit_status.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/median.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/metrics/curve.h"
#include "maxdiffusion/metrics/profile_summary.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/probes/child.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct CheckKeys {
  double minutes = 40;
  std::string output = "accelerator_check", hardware, sizes = "real", python = "python3";
  template <class V>
  void visit(V&& v) {
    v("minutes", minutes, "minutes that the whole check may take", at_least(above(0)));
    v("output", output, "folder of the report", KeyPath::output);
    v("hardware", hardware, "what is checked: gpu, tpu or cpu; empty: the first of these that is here");
    v("sizes", sizes, "of models: real, or tiny to try the check itself", one_of({"real", "tiny"}));
    v("python", python, "the Python whose torch and diffusers are timed too, if it has them");
  }
};

/// The folder with configs/ and bench/: the source tree, or the installed files.
std::string shared_folder() {
  const fs::path program = this_program(), prefix = program.parent_path().parent_path();
  for (const fs::path& folder : {prefix, prefix / "share/maxdiffusion"})
    if (fs::exists(folder / "bench/accelerator")) return folder;
  throw Error(Code::io,
              fmt::format("accelerator_check: '{}' has no share/maxdiffusion/bench/accelerator with it; expected the "
                          "program of a clone or of the tar",
                          program.string()))
      .note("try: ./run package tar in a clone, and the program in that tar; a wheel holds no tests");
}

/// A program in this program's folder, or in libexec/ of the installation; empty: none.
std::string tool(const std::string& name) {
  const fs::path folder = fs::path(this_program()).parent_path();
  for (const fs::path& file : {folder / name, folder / "../libexec" / name})
    if (fs::exists(file)) return fs::weakly_canonical(file);
  return "";
}

std::string this_hardware() {
  for (const char* hardware : {"gpu", "tpu"})
    if (pjrt::platform_for(hardware).absent("").empty()) return hardware;
  return "cpu";
}

/// The last number that the pattern's first group matches; `none` if there is no match.
double number(const std::string& text, const std::string& pattern, double none = -1) {
  const std::regex form(pattern);
  double found = none;
  for (std::sregex_iterator i(text.begin(), text.end(), form), end; i != end; ++i) found = std::stod((*i)[1].str());
  return found;
}

std::string gib(double bytes) { return bytes < 0 ? "–" : fmt::format("{:.2f}", bytes / (1 << 30)); }
std::string rounded(double value, int digits = 3) { return value < 0 ? "–" : fmt::format("{:.{}g}", value, digits); }

/// The steps in a run's metrics.jsonl.
std::vector<json> steps_of(const std::string& run) {
  std::vector<json> out;
  if (!exists(run + "/metrics.jsonl")) return out;
  std::istringstream lines(read_file(run + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);)
    if (json step = parse_json_or_discard(line); step.is_object()) out.push_back(std::move(step));
  return out;
}

std::vector<double> column(const std::vector<json>& steps, const char* name) {
  std::vector<double> out;
  for (const json& step : steps)
    if (step.contains(name) && step.at(name).is_number()) out.push_back(step.at(name));
  return out;
}

std::string as_file_name(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return text;
}

/// The newest file below a folder with this suffix; empty: none.
std::string newest(const std::string& folder, const std::string& ending) {
  fs::path best;
  std::error_code ec;
  for (const auto& f : fs::recursive_directory_iterator(folder, ec))
    if (f.path().string().ends_with(ending) && (best.empty() || fs::last_write_time(f) > fs::last_write_time(best)))
      best = f.path();
  return best;
}

/// Number of a checkpoint's array files that have the same bytes in another checkpoint, and number of all.
std::pair<int64_t, int64_t> same_files(const std::string& a, const std::string& b) {
  int64_t same = 0, all = 0;
  std::error_code ec;
  for (const auto& f : fs::recursive_directory_iterator(a, ec)) {
    if (f.path().extension() != ".safetensors") continue;
    ++all;
    const std::string other = b + "/" + f.path().lexically_relative(a).string();
    if (exists(other) && content_hash(read_file(f.path())) == content_hash(read_file(other))) ++same;
  }
  return {same, all};
}

class Check {
 public:
  explicit Check(const CheckKeys& keys)
      : keys_(keys),
        share_(shared_folder()),
        out_(fs::absolute(keys.output)),
        hardware_(keys.hardware.empty() ? this_hardware() : keys.hardware) {
    pjrt::platform_for(hardware_);  // throws for an unknown name
    for (const char* folder : {"logs", "images", "traces", "runs", "models"}) make_folders(out_ + "/" + folder);
    manifest_ = parse_json(read_file(fmt::format("{}/bench/accelerator/{}.json", share_, keys.sizes)));
    report_ = {{"version", version()},
               {"hardware", hardware_},
               {"sizes", keys.sizes},
               {"minutes", keys.minutes},
               {"steps", json::array()}};
    text_ = fmt::format(
        "# accelerator_check: {}\n\nmaxdiffusion {}, {:%Y-%m-%d %H:%M}, sizes={}, at most {} minutes. What each step "
        "printed: "
        "`logs/`. Numbers: `report.json`.\n",
        hardware_, version(), fmt::localtime(std::time(nullptr)), keys.sizes, keys.minutes);
  }

  void run() {
    section(0.15, "1. Machine, operations, collectives", [&] { machine(); });
    section(0.38, "2. Goldens", [&] { goldens(); });
    section(0.55, "3. Quickstarts compared with the CPU, resuming", [&] {
      for (const json& quickstart : manifest_.at("quickstarts")) train_quickstart(quickstart);
    });
    section(0.92, "4. Speed", [&] { speed(); });
    section(1.0, "5. Trace", [&] { trace(); });
    text_ += fmt::format("\n{:.1f} minutes in all; {} of {} steps ended well.\n", elapsed() / 60, well_,
                         report_["steps"].size());
    write();
    // Large files are removed: users copy the output folder from this machine for its report.
    for (const char* folder : {"models", "cache", "data"}) fs::remove_all(out_ + "/" + folder);
    for (const auto& run : fs::directory_iterator(out_ + "/runs"))
      if (run.is_directory())
        for (const char* folder : {"checkpoints", "vae"}) fs::remove_all(run.path() / folder);
    fmt::print("{}\n{} of {} steps ended well\n", out_ + "/report.md", well_, report_["steps"].size());
  }

 private:
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double left() const { return end_of_section_ - elapsed(); }

  void section(double end, const std::string& title, const std::function<void()>& act) {
    end_of_section_ = end * keys_.minutes * 60;
    log_info("{}: at most {:.1f} minutes", title, left() / 60);
    text_ += "\n## " + title + "\n\n";
    try {
      act();
    } catch (const std::exception& e) {  // the next section may succeed
      log_error("{}: {}", title, e.what());
      text_ += fmt::format("\nended early: {}\n", e.what());
    }
    write();
  }

  void write() {
    write_file_atomic(out_ + "/report.md", text_);
    write_file_atomic(out_ + "/report.json", dump_json(report_, 2) + "\n");
  }

  /// Whether a failure of a step is expected, and then reported in place of its figures: out of memory only, or any.
  enum class MayFail { no, of_memory, yes };
  /// Runs a step with the remaining time of its section as limit.
  ChildResult step(const std::string& name, const std::vector<std::string>& words, ChildOptions o = {},
                   MayFail may_fail = MayFail::no) {
    ChildResult r;
    if (left() < 5) {
      r.err = "no time was left";
    } else {
      o.seconds = left();
      o.log = fmt::format("{}/logs/{}.txt", out_, as_file_name(name));
      log_info("{} …", name);
      r = run_child(words, o);
    }
    const bool well = r.well() || r.stopped || may_fail == MayFail::yes ||
                      (may_fail == MayFail::of_memory && r.status == exit_status(Code::out_of_memory));
    report_["steps"].push_back({{"name", name},
                                {"command", fmt::format("{}", fmt::join(words, " "))},
                                {"well", well},
                                {"end", r.seconds == 0 ? r.err
                                        : r.stopped    ? "stopped on purpose"
                                                       : r.end()},
                                {"seconds", r.seconds},
                                {"peak_host_bytes", r.peak_bytes}});
    well_ += well;
    if (!well) {
      const std::string words_of_it = r.last_words();
      text_ += fmt::format("- **{}: {}**{}\n", name, r.seconds == 0 ? r.err : r.end(),
                           words_of_it.empty() || r.seconds == 0 ? "" : ": " + words_of_it);
      log_warning("{}: {} ({:.0f} s)", name, r.seconds == 0 ? r.err : r.end(), r.seconds);
    } else {
      log_info("{}: {:.0f} s", name, r.seconds);
    }
    return r;
  }
  ChildResult command(const std::string& name, std::vector<std::string> words, const ChildOptions& o = {},
                      MayFail may_fail = MayFail::no) {
    words.insert(words.begin(), this_program());
    return step(name, words, o, may_fail);
  }
  void table(const std::vector<std::string>& header) {
    text_ += fmt::format("\n| {} |\n|{}\n", fmt::join(header, " | "), [&] {
      std::string line;
      for (size_t i = 0; i < header.size(); ++i) line += " --- |";
      return line;
    }());
  }
  void row(const std::vector<std::string>& cells) { text_ += fmt::format("| {} |\n", fmt::join(cells, " | ")); }

  // ---- 1, 2

  /// Runs tests on the device; adds one row for each kind with its failures and largest deviations.
  void test(const std::vector<std::string>& kinds) {
    const std::string program = tool("device_tests");
    if (program.empty()) {
      text_ += "- skipped: there is no `device_tests` next to the program\n";
      return;
    }
    std::vector<std::vector<std::string>> rows, deviations;
    for (const std::string& kind : kinds) {
      if (!manifest_.at("tests").contains(kind)) continue;
      const std::string filter = manifest_.at("tests").at(kind);
      const std::string golden = share_ + "/tests/golden";
      const ChildResult r = step(kind, {program, "--gtest_color=no", "--gtest_filter=" + filter},
                                 {.environment = {{"MD_TEST_HARDWARE", hardware_},
                                                  {"MD_TEST_GOLDENS", golden},
                                                  {"XDG_CACHE_HOME", out_ + "/cache"}}},
                                 MayFail::yes);
      int64_t passed = 0;
      std::vector<std::string> failed;
      std::string name;
      std::istringstream lines(r.out);
      static const std::regex ran(R"(\[ RUN      \] (\S+))"), ended(R"(\[ +(OK|FAILED) +\] (\S+?),? .*\(\d+ ms\))"),
          deviation(R"(  outputs (\S+) \(.*gradients (\S+) \(.*)");
      for (std::string line; std::getline(lines, line);) {
        std::smatch m;
        if (std::regex_match(line, m, ran)) name = m[1];
        if (std::regex_match(line, m, deviation)) {
          deviations.push_back({name, m[1], m[2]});
          report_["deviations"][name] = {{"outputs", m[1].str()}, {"gradients", m[2].str()}};
        }
        if (!std::regex_match(line, m, ended)) continue;
        if (m[1] == "OK")
          ++passed;
        else
          failed.push_back(m[2]);
        name.clear();
      }
      if (!name.empty()) failed.push_back(name + " (" + r.end() + ")");
      report_["tests"][kind] = {{"passed", passed}, {"failed", failed}, {"end", r.end()}};
      rows.push_back({kind, fmt::format("{}", passed), fmt::format("{}", failed.size()),
                      fmt::format("{:.0f}", r.seconds), fmt::format("{}", fmt::join(failed, ", "))});
    }
    table({"tests", "passed", "failed", "s", "which failed"});
    for (const auto& cells : rows) row(cells);
    // Only the largest deviations, by the last part of their names.
    std::erase_if(deviations, [](const auto& d) { return d[1] == "0" && d[2] == "0"; });
    std::ranges::stable_sort(deviations, std::greater(),
                             [](const auto& d) { return std::max(number(d[1], "(.+)"), number(d[2], "(.+)")); });
    if (deviations.empty()) {
      text_ += "\nNothing deviates from what it is compared with.\n";
      return;
    }
    table({"relative deviation of", "outputs", "gradients"});
    for (size_t i = 0; i < std::min<size_t>(deviations.size(), 40); ++i) {
      const size_t slash = deviations[i][0].rfind('/');
      row({deviations[i][0].substr(slash == std::string::npos ? 0 : slash + 1), deviations[i][1], deviations[i][2]});
    }
    text_ += "\nAll that are not listed are smaller, or 0: `report.json`.\n";
  }

  void machine() {
    const ChildResult r =
        command("doctor", {"doctor", "hardware=" + hardware_, "output_dir=" + out_}, {}, MayFail::yes);
    report_["doctor"] = r.out;
    text_ += "```\n" + r.out + "```\n";
    test({"records", "collectives", "random numbers", "attention"});
  }

  void goldens() { test({"goldens", "more goldens"}); }

  // ---- 3

  std::vector<std::string> quickstart_words(const json& q, const std::string& run, const std::string& hardware) const {
    const int64_t steps = q.at("steps"), batch = q.at("batch");
    std::vector<std::string> words = {"train",
                                      share_ + "/" + q.at("config").get<std::string>(),
                                      "run_name=" + run,
                                      "output_dir=" + out_ + "/runs",
                                      "dataset_save_location=" + out_ + "/data",
                                      "hardware=" + hardware,
                                      "jax_cache_dir=" + out_ + "/cache",
                                      "seed=0",
                                      fmt::format("max_train_steps={}", steps),
                                      fmt::format("per_device_batch_size={}", batch),
                                      fmt::format("checkpoint_every={}", steps / 2 * batch)};
    for (const json& key : q.at("keys")) words.push_back(key);
    return words;
  }

  void train_quickstart(const json& q) {
    const std::string name = q.at("name"), config = q.at("config");
    const int64_t steps = q.at("steps"), half = steps / 2;
    const auto folder = [&](const std::string& run) { return out_ + "/runs/" + run; };
    text_ += fmt::format("\n### {} (`{}`, {} steps)\n\n", name, config, steps);
    const std::string on_cpu = name + "_cpu", on_device = name + "_" + (hardware_ == "cpu" ? "again" : hardware_);
    // The device first: it is the one under test; the CPU gets the remaining time.
    const bool device = command(on_device, quickstart_words(q, on_device, hardware_)).well();
    if (device) {
      resume(q, on_device, name + "_resumed", [&](const std::string& run) {
        fs::copy(folder(on_device), folder(run), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
        fs::remove_all(fmt::format("{}/checkpoints/{}", folder(run), steps));
        return true;
      });
      resume(q, on_device, name + "_killed", [&](const std::string& run) {
        const std::string middle = fmt::format("{}/checkpoints/{}", folder(run), half);
        const ChildResult r = command(run + ", until it is killed", quickstart_words(q, run, hardware_),
                                      {.enough = [&] { return fs::is_directory(middle); }}, MayFail::yes);
        text_ += r.stopped ? "" : fmt::format("- {}: it ended before it could be killed: {}\n", run, r.end());
        return fs::is_directory(middle);
      });
    }
    command(on_cpu, quickstart_words(q, on_cpu, "cpu"));
    const std::vector<json> a = steps_of(folder(on_cpu)), b = steps_of(folder(on_device));
    std::vector<Curve> curves;
    for (const auto& [title, of] : {std::pair{"CPU", &a}, {"device", &b}})
      if (const std::vector<double> losses = column(*of, "loss"); !losses.empty()) {
        Curve curve{.name = title, .x = {}, .y = losses};
        for (size_t i = 0; i < losses.size(); ++i) curve.x.push_back(static_cast<double>(i + 1));
        curves.push_back(std::move(curve));
      }
    if (curves.empty()) return;
    const std::string image = fmt::format("images/loss_{}.png", name);
    write_curve_png(out_ + "/" + image, name + ": loss", "step", "loss", curves);
    text_ += fmt::format("\n![loss]({})\n", image);
    table({"step", "loss on the CPU", hardware_ == "cpu" ? "loss again" : "loss on " + hardware_, "difference"});
    double largest = 0;
    const size_t both = std::min(a.size(), b.size());
    for (size_t i = 0; i < both; ++i) {
      const double x = a[i].value("loss", 0.0), y = b[i].value("loss", 0.0);
      largest = std::max(largest, std::abs(x - y) / std::max(std::abs(x), 1e-12));
      if (i == 0 || i + 1 == both || (i + 1) % std::max<size_t>(1, both / 8) == 0)
        row({fmt::format("{}", i + 1), fmt::format("{:.6f}", x), fmt::format("{:.6f}", y),
             fmt::format("{:.1e}", y - x)});
    }
    report_["quickstarts"][name] = {{"cpu", column(a, "loss")},
                                    {"device", column(b, "loss")},
                                    {"largest_relative_difference", largest},
                                    {"cpu_step_s", median(column(a, "step_time_seconds"))},
                                    {"device_step_s", median(column(b, "step_time_seconds"))}};
    text_ += fmt::format(
        "\nlargest relative difference of a step's loss: {:.1e}; median seconds of a step: CPU {}, {} {}\n", largest,
        rounded(median(column(a, "step_time_seconds"))), hardware_, rounded(median(column(b, "step_time_seconds"))));
    for (const std::string& run : {on_device, on_cpu})
      if (const std::string sample = newest(folder(run) + "/samples", ".png"); !sample.empty()) {
        const std::string copy = fmt::format("images/samples_{}.png", run);
        fs::copy_file(sample, out_ + "/" + copy, fs::copy_options::overwrite_existing);
        text_ += fmt::format("\n{}: ![samples]({})\n", run, copy);
      }
  }

  /// Resumes the interrupted run, and compares its end with that of the uninterrupted run.
  void resume(const json& q, const std::string& whole, const std::string& run,
              const std::function<bool(const std::string&)>& interrupted) {
    fs::remove_all(out_ + "/runs/" + run);
    if (!interrupted(run)) return;
    if (!command(run, quickstart_words(q, run, hardware_)).well()) return;
    const auto last = [&](const std::string& r) {
      return fmt::format("{}/runs/{}/checkpoints/{}", out_, r, q.at("steps").get<int64_t>());
    };
    const auto [same, all] = same_files(last(whole), last(run));
    report_["resumed"][run] = {{"same_files", same}, {"files", all}};
    text_ += fmt::format("- {}: {} of {} files of the last checkpoint equal the files of the run without a break{}\n",
                         run, same, all, same == all && all > 0 ? ", to the bit" : "; **not to the bit**");
  }

  // ---- 4

  /// A model folder built from the manifest's configs, without weights.
  std::string model_folder(const json& m) {
    if (m.contains("folder")) return share_ + "/" + m.at("folder").get<std::string>();
    std::string name = m.at("name");
    std::ranges::replace(name, ' ', '_');
    std::string folder = out_ + "/models/" + name;
    json index = {{"_class_name", m.at("pipeline")}};
    const auto put = [&](const std::string& part, const std::string& file, const json& config) {
      make_folders(folder + "/" + part);
      write_file_atomic(folder + "/" + part + "/" + file, dump_json(config, 1));
      const bool diffusers = config.contains("_class_name");
      index[part] = {diffusers ? "diffusers" : "transformers",
                     diffusers ? config.at("_class_name") : config.at("architectures").at(0)};
    };
    for (const auto& [part, file] : m.at("parts").items()) {
      const json config =
          parse_json(read_file(fmt::format("{}/tests/golden/full/{}.json", share_, file.get<std::string>())));
      put(part, "config.json", config);
    }
    for (const auto& [tokenizer, name] : m.at("tokenizers").items()) {
      index[tokenizer] = {"transformers", name};
      if (m.contains("files") && m.at("files").contains(tokenizer))
        fs::copy(share_ + "/" + m.at("files").at(tokenizer).get<std::string>(), folder + "/" + tokenizer,
                 fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    }
    put("scheduler", "scheduler_config.json", m.at("scheduler"));
    write_file_atomic(folder + "/model_index.json", dump_json(index, 1));
    return folder;
  }

  std::vector<std::string> speed_words(const json& m, const std::string& folder, const std::string& run, int64_t batch,
                                       int64_t steps) const {
    std::vector<std::string> words = {"train",
                                      share_ + "/" + m.at("config").get<std::string>(),
                                      "run_name=" + run,
                                      "output_dir=" + out_ + "/runs",
                                      "pretrained_model_name_or_path=" + folder,
                                      "hardware=" + hardware_,
                                      "jax_cache_dir=" + out_ + "/cache",
                                      "dataset_save_location=" + out_ + "/data",
                                      "dataset_type=synthetic",
                                      "cache_latents_text_encoder_outputs=true",
                                      "train_new_unet=true",
                                      "random_text_encoder=true",
                                      "activations_dtype=bfloat16",
                                      "save_final_checkpoint=false",
                                      "checkpoint_every=-1",
                                      "learning_rate_schedule_steps=1000",
                                      "log_period=1",
                                      fmt::format("max_train_steps={}", steps),
                                      fmt::format("per_device_batch_size={}", batch)};
    for (const json& key : m.at("keys")) words.push_back(key);
    return words;
  }

  void speed() {
    // The remaining time is divided among the models, so that a slow compilation leaves time for the others.
    const json& models = manifest_.at("models");
    const double end = end_of_section_;
    for (size_t i = 0; i < models.size(); ++i) {
      end_of_section_ = elapsed() + (end - elapsed()) / static_cast<double>(models.size() - i);
      try {
        time_model(models[i]);
      } catch (const std::exception& e) {
        text_ += fmt::format("\nended early: {}\n", e.what());
      }
      write();
    }
    end_of_section_ = end;
  }

  /// Figures of a training run: from its metrics, without the first two of more than three steps, and from its output.
  struct TimedRun {
    std::vector<json> steps;
    double step_s, planned_gib, used_gib, compile_s;
  };
  TimedRun timed_run(const ChildResult& r, const std::string& run) const {
    std::vector<json> steps = steps_of(out_ + "/runs/" + run);
    if (steps.size() > 3) steps.erase(steps.begin(), steps.begin() + 2);
    const std::string output = r.err + r.out;
    return {steps, median(column(steps, "step_time_seconds")), number(output, R"(memory per device ([\d.]+) GiB)"),
            number(output, R"(at most ([\d.]+) GiB of the device)"),
            number(output, R"(program compiled in ([\d.]+) s)")};
  }

  void time_model(const json& m) {
    const std::string name = m.at("name"), folder = model_folder(m);
    text_ += "\n### " + name + "\n\n";
    json& entry = report_["speed"][name];
    for (const int64_t batch : m.at("batches").get<std::vector<int64_t>>()) {
      const std::string run = fmt::format("{} batch {}", name, batch);
      fs::remove_all(out_ + "/runs/" + run);
      const ChildResult r = command(run, speed_words(m, folder, run, batch, m.at("steps")), {}, MayFail::of_memory);
      if (!r.well()) {
        text_ += fmt::format("- batch {}: {}{}\n", batch, r.end(),
                             r.status == 6 ? " (out of memory)" : ": " + r.last_words());
        if (left() < 5) return;
        continue;
      }
      const TimedRun timed = timed_run(r, run);
      const double seconds = timed.step_s, mfu = median(column(timed.steps, "mfu"));
      const ChildResult warm =
          command(run + ", warm", speed_words(m, folder, run + " warm", batch, 1), {}, MayFail::of_memory);
      entry = {{"batch", batch},
               {"step_s", seconds},
               {"images_s", static_cast<double>(batch) / seconds},
               {"mfu", mfu},
               {"tflops", median(column(timed.steps, "per_device_tflops"))},
               {"planned_gib", timed.planned_gib},
               {"used_gib", timed.used_gib},
               {"compile_s", timed.compile_s},
               {"cold_s", r.seconds - seconds * static_cast<double>(m.at("steps").get<int64_t>() - 1)},
               {"warm_s", warm.seconds}};
      table({"program", "batch", "step, s (median)", "samples/s", "MFU", "memory planned, GiB", "memory used, GiB",
             "compile, s", "cold: process to the end of one step, s", "warm, s"});
      row({"maxdiffusion", fmt::format("{}", batch), rounded(seconds), rounded(static_cast<double>(batch) / seconds),
           mfu > 0 ? rounded(mfu) : "–", rounded(timed.planned_gib), rounded(timed.used_gib), rounded(timed.compile_s),
           rounded(entry["cold_s"]), warm.well() ? rounded(warm.seconds) : "–"});
      peers(m, folder, batch, seconds, entry);
      break;
    }
    if (entry.is_null()) return;
    variants(m, folder, entry);
    sample(m, folder, entry);
    if (!m.contains("folder")) fs::remove_all(folder);
  }

  /// The step with other keys, compared with the one that was timed.
  void variants(const json& m, const std::string& folder, json& entry) {
    if (!m.contains("variants")) return;
    const std::string name = m.at("name");
    const int64_t batch = entry.at("batch");
    const double ours = entry.at("step_s");
    table({"keys", "step, s (median)", "÷ the step above", "memory used, GiB", "compile, s"});
    for (const json& keys : m.at("variants")) {
      const std::string shown_keys = fmt::format("{}", fmt::join(keys.get<std::vector<std::string>>(), " "));
      const std::string title = fmt::format("{} with {}", name, shown_keys), run = as_file_name(title);
      fs::remove_all(out_ + "/runs/" + run);
      std::vector<std::string> words = speed_words(m, folder, run, batch, m.at("steps"));
      words.insert(words.end(), keys.begin(), keys.end());
      const ChildResult r = command(title, words, {}, MayFail::yes);
      const TimedRun timed = timed_run(r, run);
      if (!r.well() || timed.steps.empty()) {
        row({"`" + shown_keys + "`", r.end(), "–", "–", "–"});
        continue;
      }
      row({"`" + shown_keys + "`", rounded(timed.step_s), fmt::format("{:.2f}", timed.step_s / ours),
           rounded(timed.used_gib), rounded(timed.compile_s)});
      entry["variants"].push_back({{"keys", shown_keys}, {"step_s", timed.step_s}, {"used_gib", timed.used_gib}});
    }
  }

  void peers(const json& m, const std::string& folder, int64_t batch, double ours, json& entry) {
    if (!m.contains("peer")) return;
    const json& p = m.at("peer");
    const ChildResult has = run_child({"/usr/bin/env", keys_.python, "-c", "import torch, diffusers"},
                                      {.seconds = std::min(60.0, std::max(left(), 1.0))});
    if (!has.well()) {
      text_ += fmt::format("\nPyTorch: skipped, `{}` has no torch and diffusers\n", keys_.python);
      return;
    }
    std::vector<std::string> lines;
    for (const char* mode : {"eager", "compile"}) {
      const ChildResult r = step(fmt::format("{} PyTorch {}", m.at("name").get<std::string>(), mode),
                                 {"/usr/bin/env",
                                  keys_.python,
                                  share_ + "/bench/accelerator_peer.py",
                                  fmt::format("{}/{}/config.json", folder, p.at("part").get<std::string>()),
                                  "--batch",
                                  fmt::format("{}", batch),
                                  "--height",
                                  fmt::format("{}", p.at("height").get<int64_t>()),
                                  "--width",
                                  fmt::format("{}", p.at("width").get<int64_t>()),
                                  "--frames",
                                  fmt::format("{}", p.value("frames", 1)),
                                  "--optimizer",
                                  p.at("optimizer"),
                                  "--attention",
                                  p.value("attention", "any"),
                                  "--mode",
                                  mode,
                                  "--steps",
                                  fmt::format("{}", m.at("steps").get<int64_t>()),
                                  "--device",
                                  hardware_ == "gpu" ? "cuda" : "cpu"},
                                 {}, MayFail::yes);
      const size_t at = r.out.rfind("\n{");
      const json j = parse_json_or_discard(r.out.substr(at == r.out.npos ? 0 : at + 1));
      if (!r.well() || !j.is_object()) {
        lines.push_back(fmt::format("- PyTorch {}: {}: {}\n", mode, r.end(), r.last_words()));
        continue;
      }
      entry["peers"][mode] = j;
      const double theirs = j.value("step_s", 0.0);
      row({fmt::format("PyTorch {} {}", j.value("torch", ""), mode), fmt::format("{}", batch), rounded(theirs),
           rounded(j.value("images_s", -1.0)), "–", "–", j.at("peak_bytes").is_number() ? gib(j.at("peak_bytes")) : "–",
           "–", rounded(j.value("first_s", -1.0)) + " (first step)", "–"});
      lines.push_back(fmt::format("- PyTorch {} takes {:.2f} times our step\n", mode, theirs / ours));
    }
    text_ += "\n";
    for (const std::string& line : lines) text_ += line;
  }

  /// Generates latents of a model with random weights, if there is a tool that writes these.
  void sample(const json& m, const std::string& folder, json& entry) {
    if (!m.contains("sampling")) return;
    const std::string writer = tool("random_weights"), name = m.at("name");
    if (writer.empty()) {
      text_ += "\nsampling: skipped, there is no `random_weights` next to the program\n";
      return;
    }
    std::string with_weights = folder;
    if (m.contains("folder")) {  // a folder of the source tree, which must not be written to
      with_weights = out_ + "/models/copy";
      fs::remove_all(with_weights);
      fs::copy(folder, with_weights, fs::copy_options::recursive);
    }
    if (!step(name + " random weights", {writer, with_weights}, {}, MayFail::yes).well()) return;
    std::vector<std::string> words = {"generate",
                                      share_ + "/" + m.at("config").get<std::string>(),
                                      "pretrained_model_name_or_path=" + with_weights,
                                      "train_new_unet=false",
                                      "train_new_vae=false",
                                      "random_text_encoder=false",
                                      "run_name=sampled " + name,
                                      "output_dir=" + out_ + "/images",
                                      "hardware=" + hardware_,
                                      "weights_dtype=bfloat16",
                                      "activations_dtype=bfloat16",
                                      "text_encoder_dtype=bfloat16",
                                      "vae_dtype=bfloat16",
                                      "jax_cache_dir=" + out_ + "/cache",
                                      "per_device_batch_size=1"};
    for (const json& key : m.at("sampling")) words.push_back(key);
    for (const char* when : {"cold", "warm"}) {
      const ChildResult r = command(fmt::format("{} sampling, {}", name, when), words, {}, MayFail::yes);
      if (!r.well()) {
        text_ += fmt::format("\nsampling: {}: {}\n", r.end(), r.last_words());
        return;
      }
      const double encoded = number(r.err, R"(encoded after ([\d.]+) s)"),
                   denoised = number(r.err, R"(denoised after ([\d.]+) s)"),
                   decoded = number(r.err, R"(decoded after ([\d.]+) s)");
      const double steps = number(fmt::format("{}", fmt::join(words, " ")), R"(num_inference_steps=(\d+))", 1);
      entry["sampling"][when] = {{"process_s", r.seconds},
                                 {"text_s", encoded},
                                 {"step_s", (denoised - encoded) / steps},
                                 {"decode_s", decoded - denoised}};
      text_ += fmt::format(
          "\nsampling, {}: {} s of the process, text after {} s, {} s a step of {:.0f} (programs loaded within), "
          "decoding {} s\n",
          when, rounded(r.seconds), rounded(encoded), rounded((denoised - encoded) / steps), steps,
          rounded(decoded - denoised));
    }
  }

  // ---- 5

  void trace() {
    for (const json& m : manifest_.at("models")) {
      const std::string name = m.at("name");
      if (!report_["speed"].contains(name) || report_["speed"][name].is_null()) continue;
      const std::string folder = model_folder(m), run = name + " traced";
      const int64_t batch = report_["speed"][name].at("batch");
      std::vector<std::string> words = speed_words(m, folder, run, batch, 14);
      words.insert(words.end(), {"enable_profiler=true", "skip_first_n_steps_for_profiler=3", "profiler_steps=10"});
      fs::remove_all(out_ + "/runs/" + run);
      if (!command(run, words).well()) continue;
      const std::string file = newest(out_ + "/runs/" + run, ".xplane.pb");
      if (file.empty()) continue;
      for (const std::string& f : {file, newest(out_ + "/runs/" + run, ".trace.json.gz")})
        if (!f.empty())
          fs::copy_file(f, out_ + "/traces/" + fs::path(f).filename().string(), fs::copy_options::overwrite_existing);
      const ProfileSummary s = summarize_profile(file);
      json& entry = report_["trace"] = {
          {"model", name},           {"steps", s.steps}, {"step_s", s.step}, {"host_s", s.host},
          {"waited_s", s.waited},    {"busy", s.busy},   {"span", s.span},   {"longest_gap_s", s.longest_gap},
          {"of_device", s.of_device}};
      text_ += fmt::format(
          "{}, batch {}, {} steps of {:.4f} s (median). A step takes the host's thread {:.0f} µs (target: 20 µs) and "
          "{:.0f} µs of waits. "
          "{}: busy {:.1f} % of {:.3f} s, longest gap {:.2f} ms.\n",
          name, batch, s.steps, s.step, s.host * 1e6, s.waited * 1e6,
          s.of_device ? "The first device" : "This plugin records no device; kernels are spans of the host's threads",
          100 * s.busy / std::max(s.span, 1e-12), s.span, s.longest_gap * 1e3);
      table({"kernel", "calls", "ms a step", "% of all"});
      double all = 0;
      for (const auto& k : s.kernels) all += k.seconds;
      for (size_t i = 0; i < std::min<size_t>(20, s.kernels.size()); ++i) {
        const ProfileSummary::Kernel& k = s.kernels[i];
        row({"`" + k.name.substr(0, 90) + "`", fmt::format("{}", k.calls),
             fmt::format("{:.3f}", k.seconds * 1e3 / static_cast<double>(std::max<int64_t>(1, s.steps))),
             fmt::format("{:.1f}", 100 * k.seconds / std::max(all, 1e-12))});
        entry["kernels"].push_back({{"name", k.name}, {"calls", k.calls}, {"seconds", k.seconds}});
      }
      return;
    }
    text_ += "no model was timed\n";
  }

  CheckKeys keys_;
  std::string share_, out_, hardware_;
  Clock::time_point start_ = Clock::now();
  double end_of_section_ = 0;
  json manifest_, report_;
  std::string text_;
  int64_t well_ = 0;
};

void accelerator_check(const Words& words) {
  CheckKeys keys;
  assign(words, 0, keys);
  Check(keys).run();
}

}  // namespace

Command accelerator_check_command() {
  return {"accelerator_check", "[minutes=40] [output=FOLDER] [hardware=gpu|tpu|cpu]",
          "check a device and time it: operations, goldens, quickstarts, speed, traces; writes a report",
          accelerator_check, [](const KeyPrinter& print) { print_command_keys<CheckKeys>(print); }};
}

}  // namespace md
