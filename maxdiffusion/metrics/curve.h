// Line plots as PNG files.
#pragma once

#include <string>
#include <vector>

namespace md {

struct Curve {
  std::string name;  // in the legend, where not empty
  std::vector<double> x, y;
  bool faint = false;  // thin and pale, for raw values behind a smoothed curve of the same colour
};
/// A line plot with axes, ticks and a legend, as PNG. `log_y` where all values are positive. Points that are not finite
/// (or not positive, with log_y) break the line.
void write_curve_png(const std::string& path, const std::string& title, const std::string& x_label,
                     const std::string& y_label, const std::vector<Curve>& curves, bool log_y = false);

/// Weighted mean around each value; weights fall to 1/e `horizon` values away, to both sides, so nothing lags.
std::vector<double> smoothed(const std::vector<double>& values, double horizon);

/// Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], at most `most` of them.
std::vector<double> axis_ticks(double low, double high, int most);

}  // namespace md
