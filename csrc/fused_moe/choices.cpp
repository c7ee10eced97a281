// The memos of choices by problem, and of what choices are made by.
#include "fused_moe/choices.hpp"

#include <algorithm>
#include <bit>
#include <map>
#include <memory>

#include "common/check.hpp"
#include "common/memo.hpp"
#include "grouped_gemm/measured_choices.hpp"

namespace moe_ext::fused_moe {
namespace {

namespace gemm = grouped_gemm;

constexpr char const* kOp = "fused_moe_teach";

struct Hash {
  std::size_t operator()(Problem const& problem) const {
    return hash_of(
        {problem.num_slots,
         problem.num_experts,
         problem.hidden,
         problem.intermediate,
         problem.flags * 2 + problem.w13_bias,
         static_cast<std::int64_t>(problem.w13_scale.granularity) * 2 + problem.w13_scale.n_segments,
         static_cast<std::int64_t>(problem.w2_scale.granularity),
         std::bit_cast<std::int64_t>(problem.alpha),
         std::bit_cast<std::int64_t>(problem.limit),
         problem.sm_count});
  }
};

Memo<Problem, Choice, Hash>& memo() {
  static Memo<Problem, Choice, Hash> memo;
  return memo;
}

using Table = std::shared_ptr<gemm::MeasuredChoices const>;

Memo<std::int64_t, Table, std::hash<std::int64_t>>& tables() {
  static Memo<std::int64_t, Table, std::hash<std::int64_t>> tables;
  return tables;
}

/// What a choice for any number of slots takes.
struct Chooser {
  Table table;
  std::uint64_t allowed;
  decltype(Choice::gating) gating;
};

Memo<Problem, Chooser, Hash>& choosers() {
  static Memo<Problem, Chooser, Hash> choosers;
  return choosers;
}

Problem with_any_slots(Problem problem) {
  problem.num_slots = 0;
  return problem;
}

Choice choose(Chooser const& chooser, Problem const& problem) {
  gemm::LayerSizes const sizes{static_cast<double>(problem.num_slots),
                               static_cast<double>(problem.num_experts),
                               static_cast<double>(problem.hidden),
                               static_cast<double>(problem.intermediate)};
  int const choice = chooser.table->choose(sizes, problem.sm_count, chooser.allowed).choice;
  gemm::Kernels const& kernels = chooser.table->kernels_of(choice);
  return {.w13_config = kernels.first, .w2_config = kernels.second, .gating = chooser.gating};
}

}  // namespace

std::optional<Choice> recall(Problem const& problem) {
  std::optional<Choice> const known = memo().recall(problem);
  if (known.has_value()) {
    return known;
  }
  std::optional<Chooser> const chooser = choosers().recall(with_any_slots(problem));
  if (!chooser.has_value()) {
    return std::nullopt;
  }
  Choice const choice = choose(*chooser, problem);
  remember(problem, choice);
  return choice;
}

void remember(Problem const& problem, Choice const& choice) {
  memo().remember(problem, choice);
}

void remember(Problem const& problem, Choice const& choice, Rule const& rule) {
  std::optional<Table> const table = tables().recall(rule.table);
  check_value(table.has_value(), kOp, ": table ", rule.table, " must have been told, got another number");
  choosers().remember(with_any_slots(problem),
                      {*table, static_cast<std::uint64_t>(rule.allowed), choice.gating});
}

void fused_moe_teach(std::int64_t number,
                     std::vector<std::int64_t> const& choices,
                     std::vector<std::int64_t> const& costly,
                     std::vector<double> const& costs,
                     std::vector<double> const& common,
                     std::vector<double> const& problems,
                     std::int64_t sm_count,
                     double radius,
                     double shrink) {
  std::size_t const num_choices = choices.size() / 2;
  std::size_t const length = 4 + num_choices;
  constexpr std::size_t kCosts = std::tuple_size_v<gemm::Costs>;
  check_value(choices.size() % 2 == 0 && costs.size() == costly.size() * kCosts && common.size() == 3 &&
                  problems.size() % length == 0,
              kOp,
              ": lists must be of pairs, of ",
              kCosts,
              " costs, of 3 and of ",
              length,
              " numbers a problem, got ",
              choices.size(),
              ", ",
              costs.size(),
              ", ",
              common.size(),
              " and ",
              problems.size());
  std::vector<gemm::Kernels> kernels;
  for (std::size_t i = 0; i < choices.size(); i += 2) {
    kernels.push_back({static_cast<int>(choices[i]), static_cast<int>(choices[i + 1])});
  }
  std::map<int, gemm::Costs> costs_of;
  for (std::size_t i = 0; i < costly.size(); ++i) {
    std::copy_n(costs.begin() + static_cast<std::ptrdiff_t>(i * kCosts),
                kCosts,
                costs_of[static_cast<int>(costly[i])].begin());
  }
  std::vector<gemm::MeasuredProblem> measured;
  for (auto first = problems.begin(); first != problems.end(); first += static_cast<std::ptrdiff_t>(length)) {
    measured.push_back(
        {{first[0], first[1], first[2], first[3]}, {first + 4, first + static_cast<std::ptrdiff_t>(length)}});
  }
  tables().remember(number,
                    std::make_shared<gemm::MeasuredChoices const>(std::move(kernels),
                                                                  costs_of,
                                                                  std::array{common[0], common[1], common[2]},
                                                                  measured,
                                                                  static_cast<int>(sm_count),
                                                                  radius,
                                                                  shrink));
}

}  // namespace moe_ext::fused_moe
