// Meetings and losses between hubs that are threads of one process.
#include "maxdiffusion/processes/hub.h"

#include <gtest/gtest.h>

#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/processes/launch.h"

namespace md {
namespace {

using namespace std::chrono_literals;

/// Hubs of one job, each joined.
struct Job {
  std::vector<std::unique_ptr<Hub>> hubs;
  std::mutex mutex;
  std::map<int64_t, std::string> lost;  // by the rank that was told

  explicit Job(int64_t n, std::chrono::milliseconds limit = 6000ms) {
    for (int64_t r = 0; r < n; ++r)
      hubs.push_back(std::make_unique<Hub>(HubOptions{.rank = r,
                                                      .count = n,
                                                      .secret = "of this test",
                                                      .beat = 50ms,
                                                      .limit = limit,
                                                      .own_end = 50ms,
                                                      .lost = [this, r](const std::string& why) {
                                                        std::lock_guard lock(mutex);
                                                        lost[r] = why;
                                                      }}));
    const std::string address = hubs[0]->address();
    std::vector<std::future<void>> joins;
    for (auto& hub : hubs) joins.push_back(std::async(std::launch::async, [&] { hub->join(address); }));
    for (auto& j : joins) j.get();
  }
  template <class F>
  void each(F&& act) {
    std::vector<std::future<void>> all;
    for (size_t r = 0; r < hubs.size(); ++r)
      all.push_back(std::async(std::launch::async, [&, r] { act(static_cast<int64_t>(r), *hubs[r]); }));
    for (auto& a : all) a.get();
  }
  std::string told(int64_t rank) {
    for (int i = 0; i < 500; ++i) {
      {
        std::lock_guard lock(mutex);
        if (lost.contains(rank)) return lost[rank];
      }
      std::this_thread::sleep_for(10ms);
    }
    return "nothing";
  }
};

TEST(Hub, GathersTextsInTheOrderOfRanksOnEveryTopicByItself) {
  Job job(4);
  job.each([](int64_t rank, Hub& hub) {
    std::thread other([&] {
      for (int i = 0; i < 50; ++i) hub.gather("another", std::to_string(i));
    });
    for (int i = 0; i < 50; ++i) {
      const auto all = hub.gather("topic", fmt::format("{}:{}\n", rank, i));
      for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(all.at(static_cast<size_t>(r)), fmt::format("{}:{}\n", r, i));
    }
    other.join();
    EXPECT_EQ(hub.gather("large", std::string(1 << 20, 'x')).at(3).size(), size_t{1} << 20);
    hub.gather("end", "");
    hub.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Hub, TellsTheLeaderWhatAllGiveAndTheOthersWhatTheLeaderGives) {
  Job job(3);
  job.each([](int64_t rank, Hub& hub) {
    const std::string mine = std::string(1 << 20, static_cast<char>('a' + rank));
    for (int i = 0; i < 3; ++i) {
      const auto told = hub.gather("to the leader", rank == 0 ? fmt::format("plan {}", i) : mine, true);
      ASSERT_EQ(told.size(), rank == 0 ? 3u : 1u);
      EXPECT_EQ(told[0], fmt::format("plan {}", i));
      if (rank == 0) {
        EXPECT_EQ(told[1], std::string(1 << 20, 'b'));
        EXPECT_EQ(told[2], std::string(1 << 20, 'c'));
      }
    }
    hub.gather("end", "");
    hub.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Hub, GivesEveryProcessWhatAnotherHasPut) {
  Job job(3);
  job.each([](int64_t rank, Hub& hub) {
    const std::string bytes("\0\n:\xff", 4), odd(300, ':');
    EXPECT_EQ(hub.get("nobody"), std::nullopt);
    hub.put(fmt::format("of {}", rank), bytes + std::to_string(rank));
    if (rank == 1) hub.put(odd, "");
    hub.gather("all have put", "");
    std::thread other([&] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(hub.get(odd), "");
      }
    });
    for (int i = 0; i < 50; ++i) {
      for (int64_t r = 0; r < 3; ++r) {
        EXPECT_EQ(hub.get(fmt::format("of {}", r)), bytes + std::to_string(r));
      }
    }
    other.join();
    EXPECT_EQ(hub.get("nobody"), std::nullopt);
    hub.gather("end", "");
    hub.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Hub, AProcessThatFailsEndsTheWaitOfAllOthersByItsName) {
  for (int64_t bad : {0, 2}) {
    Job job(3);
    job.each([&](int64_t rank, Hub& hub) {
      if (rank == bad) return hub.leave(false);
      try {
        hub.gather("never", "");
        ADD_FAILURE() << "process " << rank << " did not notice";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::device);
        EXPECT_NE(e.message().find(fmt::format("process {} (", bad)), std::string::npos) << e.message();
      }
    });
    for (int64_t r = 0; r < 3; ++r)
      if (r != bad) {
        EXPECT_NE(job.told(r).find(fmt::format("process {} (", bad)), std::string::npos) << job.told(r);
      }
  }
}

TEST(Hub, AProcessThatLeavesWellIsNotMissed) {
  Job job(3);
  job.each([](int64_t rank, Hub& hub) {
    hub.gather("end", "");
    if (rank > 0) hub.leave(true);
  });
  std::this_thread::sleep_for(200ms);
  job.hubs[0]->leave(true);
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Hub, AStrangerDoesNotJoin) {
  Hub leader({.rank = 0, .count = 2, .secret = "right", .joining = 300ms});
  Hub stranger({.rank = 1, .count = 2, .secret = "wrong", .joining = 300ms});
  auto joined = std::async(std::launch::async, [&] { stranger.join(leader.address()); });
  EXPECT_THROW(leader.join(leader.address()), Error);
  EXPECT_THROW(joined.get(), Error);
}

TEST(Launch, IsReadFromWhatTheLauncherSets) {
  auto with = [](std::map<std::string, std::string> variables) {
    return launch_of([variables = std::move(variables)](const char* name) {
      const auto v = variables.find(name);
      return v == variables.end() ? nullptr : v->second.c_str();
    });
  };
  EXPECT_EQ(with({}).count, 1);
  EXPECT_EQ(with({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}).rank, 2);
  EXPECT_EQ(with({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}).count, 4);
  EXPECT_THROW(with({{"PMI_RANK", "4"}, {"PMI_SIZE", "4"}}), Error);
  EXPECT_THROW(with({{"PMI_RANK", "x"}, {"PMI_SIZE", "4"}}), Error);
  EXPECT_THROW(with({{"OMPI_COMM_WORLD_SIZE", "2"}}), Error);
}

}  // namespace
}  // namespace md
