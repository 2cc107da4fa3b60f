#include "maxdiffusion/base/trace.h"

#include <gtest/gtest.h>

#include <thread>

namespace md {
namespace {

TEST(Trace, HoldsSpansOfEveryThreadFromStartToStop) {
  { Span before("before"); }
  Span open("began before");
  start_tracing();
  {
    Span outer("outer", 7);
    Span inner("inner");
    std::thread([] {
      pthread_setname_np(pthread_self(), "helper");
      Span s("other");
    }).join();
  }
  const auto threads = stop_tracing();
  { Span after("after"); }
  ASSERT_EQ(threads.size(), 2u);
  EXPECT_EQ(threads[0].name, "helper");
  ASSERT_EQ(threads[0].spans.size(), 1u);
  EXPECT_STREQ(threads[0].spans[0].name, "other");
  ASSERT_EQ(threads[1].spans.size(), 2u);
  EXPECT_STREQ(threads[1].spans[0].name, "inner");
  const TracedSpan &inner = threads[1].spans[0], &outer = threads[1].spans[1];
  EXPECT_EQ(outer.number, 7);
  EXPECT_LE(outer.start_ns, inner.start_ns);
  EXPECT_LE(inner.start_ns, threads[0].spans[0].start_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);

  start_tracing();
  { Span again("again"); }
  const auto second = stop_tracing();
  ASSERT_EQ(second.size(), 1u);
  ASSERT_EQ(second[0].spans.size(), 1u);
}

}  // namespace
}  // namespace md
