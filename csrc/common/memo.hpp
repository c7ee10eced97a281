// Answers remembered by their questions, for calls that would otherwise ask Python again.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace moe_ext {

/// What calls leave behind, a map behind a lock. For a pure function's answers alone: then no order of calls, and no
/// number of threads, changes what a call gets, and nothing is lost that could not be asked for again.
template <class Question, class Answer, class Hash>
class Memo {
 public:
  std::optional<Answer> recall(Question const& question) {
    std::lock_guard const lock(mutex_);
    auto const found = answers_.find(question);
    return found == answers_.end() ? std::nullopt : std::optional(found->second);
  }

  void remember(Question const& question, Answer const& answer) {
    std::lock_guard const lock(mutex_);
    if (answers_.size() >= kMostAnswers) {
      answers_.clear();
    }
    answers_.insert_or_assign(question, answer);
  }

 private:
  /// Beyond this many it starts afresh: a serving engine's batch sizes are hundreds.
  static constexpr std::size_t kMostAnswers = 8192;

  std::mutex mutex_;
  std::unordered_map<Question, Answer, Hash> answers_;
};

/// A hash of numbers in their order.
inline std::size_t hash_of(std::initializer_list<std::int64_t> parts) {
  std::uint64_t hash = 0;
  for (std::int64_t const part : parts) {
    hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace moe_ext
