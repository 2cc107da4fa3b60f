// Optimizer arguments as texts: NAME=VALUE with Python values, as in trainers' `optimizer_args`.

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

using ArgumentValue = OptimizerArgument::Value;

std::string trimmed(const std::string& text) {
  const char* blanks = " \t'\"()[]";
  const size_t from = text.find_first_not_of(blanks), to = text.find_last_not_of(blanks);
  return from == text.npos ? "" : text.substr(from, to - from + 1);
}

std::vector<std::string> numbers_of(const std::string& text) {
  std::vector<std::string> out;
  for (size_t from = 0; from <= text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size());
    out.push_back(trimmed(text.substr(from, comma - from)));
    from = comma + 1;
  }
  return out;
}

/// Parses the text of one argument; throws invalid_config with the expected form.
class ArgumentReader {
 public:
  ArgumentReader(const OptimizerArgument& a, const std::string& text) : a_(a), text_(trimmed(text)) {}

  ArgumentValue value() const {
    return std::visit([this](const auto& v) -> ArgumentValue { return read(v); }, a_.value);
  }

 private:
  bool read(bool) const {
    const std::set<std::string> yes = {"True", "true", "1"}, no = {"False", "false", "0"};
    if (!yes.contains(text_) && !no.contains(text_)) refuse("True or False");
    return yes.contains(text_);
  }
  double read(double) const { return number(text_); }
  std::optional<double> read(const std::optional<double>&) const {
    if (text_ == "None" || text_ == "none" || text_ == "null") return std::nullopt;
    return number(text_);
  }
  std::vector<double> read(const std::vector<double>& like) const {
    const std::vector<std::string> texts = numbers_of(text_);
    if (texts.size() != like.size())
      refuse(fmt::format("{} numbers, as in {}={}", like.size(), a_.name, example(like)));
    std::vector<double> out;
    for (const std::string& text : texts) out.push_back(number(text));
    return out;
  }
  std::string read(const std::string&) const {
    if (std::ranges::count(a_.words, text_) == 0) refuse(one_of(a_.words).text());
    return text_;
  }

  static std::string example(const std::vector<double>& like) {
    std::string out;
    for (const double v : like) out += fmt::format("{}{}", out.empty() ? "" : ",", v);
    return out;
  }
  double number(const std::string& text) const {
    double v = 0;
    if (text == "inf") return HUGE_VAL;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), v);
    const bool is_number = fault == std::errc() && end == text.data() + text.size() && std::isfinite(v);
    if (!is_number || (a_.range && !a_.range->contains(v)))
      refuse(a_.range && !a_.range->text().empty() ? "a number, " + a_.range->text() : "a number");
    return v;
  }
  [[noreturn]] void refuse(const std::string& expected) const {
    fail(Code::invalid_config, "optimizer_args: {} is '{}'; expected {}", a_.name, text_, expected);
  }

  const OptimizerArgument& a_;
  std::string text_;
};

/// "b1" of "adam_b1".
std::string without_prefix(const char* key) {
  const std::string name = key;
  return name.substr(name.find('_') + 1);
}

}  // namespace

std::string to_string(const ArgumentValue& value) {
  struct Print {
    std::string operator()(bool v) const { return v ? "True" : "False"; }
    std::string operator()(double v) const { return fmt::format("{}", v); }
    std::string operator()(const std::optional<double>& v) const { return v ? (*this)(*v) : "None"; }
    std::string operator()(const std::vector<double>& v) const {
      std::string out = "(";
      for (const double x : v) out += (out.size() > 1 ? ", " : "") + (*this)(x);
      return out + ")";
    }
    std::string operator()(const std::string& v) const { return v; }
  };
  return std::visit(Print(), value);
}

std::vector<OptimizerArgument> assigned(std::vector<OptimizerArgument> arguments, const std::vector<std::string>& words,
                                        const std::string& optimizer) {
  for (const std::string& word : words) {
    const size_t sign = word.find('=');
    check(sign != word.npos, Code::invalid_config, "optimizer_args: '{}' has no '='; expected NAME=VALUE", word);
    const std::string name = trimmed(word.substr(0, sign));
    const auto a = std::ranges::find(arguments, name, &OptimizerArgument::name);
    if (a == arguments.end()) {
      std::vector<std::string> names;
      for (const OptimizerArgument& known : arguments) names.push_back(known.name);
      fail(Code::invalid_config, "optimizer_args: optimizer={} has no argument '{}'; expected one of: {}", optimizer,
           name, nearest_first(name, names));
    }
    a->value = ArgumentReader(*a, word.substr(sign + 1)).value();
  }
  return arguments;
}

std::vector<OptimizerArgument> arguments_of_keys(const std::vector<OptimizerKey>& keys) {
  std::vector<OptimizerArgument> out;
  for (const OptimizerKey& k : keys) {
    const std::string name = without_prefix(k.name);
    if (name == "b2") {
      std::get<std::vector<double>>(out.back().value).push_back(std::get<double>(k.value));
      continue;
    }
    OptimizerArgument a{name, {}, fmt::format("the key `{}`", k.name), k.range};
    std::visit([&](auto v) { a.value = v; }, k.value);
    if (name == "b1") {
      a.name = "betas", a.value = std::vector<double>{std::get<double>(k.value)};
      a.meaning = fmt::format("the keys `{}` and `{}2`", k.name, std::string(k.name, std::string(k.name).size() - 1));
    }
    out.push_back(std::move(a));
  }
  return out;
}

void set_keys(OptimConfig& config, const std::vector<OptimizerKey>& keys,
              const std::vector<OptimizerArgument>& arguments) {
  const std::vector<OptimizerArgument> defaults = arguments_of_keys(keys);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const OptimizerArgument& a = arguments[i];
    if (a.value == defaults[i].value) continue;
    for (const OptimizerKey& k : keys) {
      const std::string name = without_prefix(k.name);
      if (a.name == "betas" && name.size() == 2 && name[0] == 'b')
        config.optimizer_arg<double>(k.name) = std::get<std::vector<double>>(a.value)[name == "b1" ? 0 : 1];
      else if (name == a.name && std::holds_alternative<bool>(k.value))
        config.optimizer_arg<bool>(k.name) = std::get<bool>(a.value);
      else if (name == a.name)
        config.optimizer_arg<double>(k.name) = std::get<double>(a.value);
    }
  }
}

std::string called(const std::string& class_name, const std::vector<OptimizerArgument>& arguments) {
  std::string out;
  for (const OptimizerArgument& a : arguments)
    out += fmt::format("{}{}={}", out.empty() ? "" : ",", a.name, to_string(a.value));
  return class_name + "(" + out + ")";
}

}  // namespace md
