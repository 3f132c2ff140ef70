"""What `families.py` offers, for editors and type checkers; written by `docs/write_families.py`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from braidrl.flow.stage import Stage, When

class AdvantageNames:
    def cost_gae(
        self, *, gamma: float = 1.0, lam: float = 1.0, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return A_t = Σ_l (γλ)^l·δ_{t+l} and the returns A_t + V_t, one per action token.

        GAE, arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equation 11. Without `token_rewards`, `reward`
        is given at the row's last action token.

        Args:
            gamma: Discount per action token.
            lam: λ: 0 looks one token ahead, 1 looks to the end of the row.
        """

    def decoupled_gae(
        self, *, gamma: float = 1.0, lam_critic: float = 1.0, lam_actor: float | None = None,
        alpha: float = 0.05, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Return `gae` with one λ for the advantages and another for the critic's returns.

        VC-PPO, arXiv 2503.01491, with a given `lam_actor`; VAPO, arXiv 2504.05118, without one: 1 − 1/(alpha·l),
        in [0, 1], for a row of l action tokens.
        """

    def distillation(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return log π_teacher − log π per action token; the teacher is the reference.

        On-policy distillation, arXiv 2306.13649.
        """

    def gae(
        self, *, gamma: float = 1.0, lam: float = 1.0, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return A_t = Σ_l (γλ)^l·δ_{t+l} and the returns A_t + V_t, one per action token.

        GAE, arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equation 11. Without `token_rewards`, `reward`
        is given at the row's last action token.

        Args:
            gamma: Discount per action token.
            lam: λ: 0 looks one token ahead, 1 looks to the end of the row.
        """

    def gigpo(
        self, *, weight: float = 1.0, gamma: float = 1.0, scale: bool = True, epsilon: float = 1e-06,
        of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return A_{i,k} = A^E_i + w·A^S_{i,k}: advantages of whole episodes and of turns from one state, (by
        turn).

        A^E normalises the rewards R of a group's rows, equation 3. A^S normalises the returns to go Σ_{l ≥ k}
        γ^(l − k)·r_{i,l} of all turns of a group that begin in one state, equations 6 and 7; a state that occurs
        once gives 0. GiGPO, arXiv 2505.10978. A state is what the model saw before the turn, so that its
        baseline depends on no later act.

        Args:
            weight: w, the weight of the turns' advantages.
            gamma: Discount per turn in the returns to go.
            scale: Divide by the deviation; without it rewards are only centred.
            epsilon: Added to the deviation.
        """

    def group_centered(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return R − R̄, (B,). Dr. GRPO, arXiv 2503.20783."""

    def group_normalized(
        self, *, epsilon: float = 1e-06, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Return (R − R̄)/(s + epsilon), s the sample deviation, (B,); 0 for equal scores. GRPO, arXiv 2402.03300;
        DAPO, arXiv 2503.14476.
        """

    def leave_one_out(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return G/(G − 1)·(R − R̄), (B,): each reward minus the mean of the group's other samples; 0 in a group of
        one sample. RLOO, arXiv 2402.14740.
        """

    def maxrl(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return (R − R̄)/R̄ on the successes R ∈ {0, 1}, (B,); 0 in a group without a success. MaxRL, arXiv
        2602.02710.
        """

    def mt_grpo(
        self, *, weight: float = 1.0, scale: bool = True, epsilon: float = 1e-06, of: str | None = None,
        id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return A_{i,k} = Â_i + w·Σ_{l ≥ k} Â_{i,l}: the outcome's advantage, and those of the turns' own rewards.

        Multi-turn GRPO, arXiv 2505.11821: Â_{i,l} normalises the rewards of turn l in the group, and Â_i the
        outcomes, which are the rows' rewards without those of turns before the last. The sum over l runs to the
        longest row's end, since turns that a row did not reach count with reward 0.

        Args:
            weight: w, the weight of the turns' own rewards.
            scale: Divide by the group's deviation; without it rewards are only centred.
            epsilon: Added to the deviation.
        """

    def optimal_baseline(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return R − Σ l_j R_j / Σ l_j with the lengths l in action tokens as weights, (B,). OPO, arXiv 2505.23585."""

    def pass_at_k(
        self, *, k: int = 4, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Return each sample's mean normalised advantage over the k-subsets of its group that contain it, (B,), in
        closed form.

        A subset scores 1 if any of its k samples is right. With n samples of which w are wrong, R̄ = 1 − C(w,
        k)/C(n, k) and σ² = R̄(1 − R̄): a right sample gets (1 − R̄)/σ, a wrong one (1 − R̄ − C(w − 1, k − 1)/C(n
        − 1, k − 1))/σ, and every sample gets 0 where σ = 0. Pass@k training, arXiv 2508.10751, its analytical
        form. Raises ValueError if a group has fewer than k samples. With fewer that count in its statistics, its
        samples get 0.
        """

    def reinforce_plus_plus(
        self, *, gamma: float = 1.0, epsilon: float = 1e-08, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return returns-to-go per action token, whitened over the batch. REINFORCE++, arXiv 2501.03262."""

    def reinforce_plus_plus_baseline(
        self, *, epsilon: float = 1e-08, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Return `advantage` (R − R̄ of `group_centered`) whitened over the batch's tokens.

        REINFORCE++ with baseline, arXiv 2501.03262.
        """

    def remax(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return R minus the reward of the same prompt's greedy response, (B,). ReMax, arXiv 2310.10505."""

    def safe_rlhf(
        self, *, threshold: float = 0.0, learning_rate: float = 0.1, multiplier: float = 1.0,
        of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return (A_reward − λ·A_cost)/(1 + λ); λ ≥ 0 rises by learning_rate·(mean `cost` − threshold) per
        iteration. arXiv 2310.12773.
        """

    def turn_gae(
        self, *, gamma: float = 1.0, lam: float = 1.0, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return GAE with turns as steps, A_k = Σ_l (γλ)^l·δ_{k+l}, and the returns A_k + V_k at each of a turn's
        tokens.

        δ_k = r_k + γ·V_{k+1} − V_k, where V_k is the value at the turn's first action token and V = 0 after the
        last turn. GAE, arXiv 1506.02438, equation 16.

        Args:
            gamma: Discount per turn.
            lam: λ: 0 looks one turn ahead, 1 looks to the end of the row.
        """

    def turn_returns(
        self, *, gamma: float = 1.0, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Return A_{i,k} = G_{i,k} − mean of G_{j,k} over the group's rows j that reached turn k, with the returns
        to go G_{i,k} = Σ_{l ≥ k} γ^(l − k)·r_{i,l}.

        REINFORCE with returns to go. This baseline depends on no act of turn k or later: all that reached turn k
        count, however they went on. A row that the statistics leave out has advantage 0. With γ = −1 a row is a
        game of two sides that move in turn, and a turn gains what the other side loses: self-play of one policy.
        """

    def whiten(
        self, *, epsilon: float = 1e-08, of: str | None = None, id: str | None = None, when: When = ...,
        after: Sequence[str] = ...
    ) -> Stage:
        """Normalise advantages to mean 0 and deviation 1 over the batch's action tokens, as implementations of PPO
        do.
        """

    def __getattr__(self, name: str) -> Callable[..., Stage]: ...

class ShapeNames:
    def adaptive_kl_penalty(
        self, *, target: float, gain: float = 0.1, estimator: str = "k1", coef: float = 0.05,
        of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return `kl_penalty` with a coefficient that is adapted to a target of the mean KL, in nats per row. arXiv
        1909.08593, section 2.2.
        """

    def advantage_kl_penalty(
        self, *, coef: float, estimator: str = "k1", of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return the row's `advantage` (B,) minus coef·KL(π, π_ref) summed from each action token to the row's end.

        This is a KL penalty per token in the return, while the baseline has none, as in ReMax, arXiv 2310.10505.
        """

    def covariance(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return (log π_old − its mean)·(A − its mean) per action token, means over the batch, at the start of the
        update. arXiv 2505.22617.
        """

    def elo(
        self, *, gain: float = 200.0, rating: float = 0.0, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return the expected points (B,) of each row's policy, from a rating that follows its results: its lead
        over those it plays, in Elo points.

        A score above 0 is a win, 0 a draw, below 0 a loss. The rating is in the metrics, and in checkpoints.

        Args:
            gain: Elo points by which a batch of wins raises a rating of 0, times two.
        """

    def highest_covariance(
        self, *, fraction: float, low: float | None = None, high: float | None = None, of: str | None = None,
        id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return 1 for the `fraction` of the batch's action tokens with the highest covariance, 0 for others.

        arXiv 2505.22617: 2e-4 within (1, 5) for Clip-Cov, 2e-4 to 2e-3 without bounds for KL-Cov. Clip-Cov in
        the paper draws tokens at random; this takes the highest, so that the result is deterministic. It takes
        at least one token, at most one bin (0.3% in value) too many, and none with a covariance of 1e-6 or less.

        Args:
            fraction: Share of the action tokens to choose.
            low: Lower bound: only tokens with a larger covariance are chosen.
            high: Upper bound: only tokens with a smaller covariance are chosen.
        """

    def implicit_reward(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return the sum over each row's action tokens of log π − log π_ref, (B,) float64: the reward that a policy
        and its reference imply, without β and a term of the prompt alone.

        DPO, arXiv 2305.18290, equation 5.
        """

    def kl_penalty(
        self, *, coef: float, estimator: str = "k1", of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return −coef·KL(π, π_ref) per action token, plus `reward` (B,) at the row's last one.

        arXiv 1909.08593, equation 2, per token as in InstructGPT, arXiv 2203.02155. π is `old_log_probs` where a
        stage writes them and the engine's `rollout_log_probs` otherwise.
        """

    def overlong_exclude(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Apply `overlong_filter`, and exclude truncated rows from their group's statistics too; two masks (B,)
        float32.
        """

    def overlong_filter(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return 0 for rows truncated at the length limit and 1 for others, (B,) float32, times an earlier mask.

        Overlong filtering, DAPO, arXiv 2503.14476, section 3.4: such rows are excluded from the loss, but not
        from their group's statistics.
        """

    def overlong_penalty(
        self, *, max_response_tokens: int, cache: int, of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return `reward` with soft overlong punishment, (B,): 0 up to max − cache action tokens, falling to −1 at
        max, −1 beyond.

        DAPO, arXiv 2503.14476, equation 13. Raises ValueError unless 0 < cache ≤ max.
        """

    def response_log_prob(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return the sum of the log-probs of each row's action tokens, (B,) float64."""

    def row_kl_penalty(
        self, *, coef: float, estimator: str = "k1", of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return `reward` (B,) minus coef·KL(π, π_ref) summed over the row, for advantages per row (RLOO). arXiv
        1909.08593, equation 2.
        """

    def safe_rlhf_kl_penalty(
        self, *, coef: float, estimator: str = "k1", of: str | None = None, id: str | None = None,
        when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Return rewards minus half of the KL penalty, and costs plus half of it, per action token.

        Safe-RLHF, arXiv 2310.12773: (reward − λ·cost)/(1 + λ) then contains the penalty coef/2 for every λ.
        """

    def __getattr__(self, name: str) -> Callable[..., Stage]: ...

class SelectNames:
    def informative_groups(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Drop groups that are all right or all wrong: they keep 0 < #correct < G.

        Dynamic sampling, DAPO, arXiv 2503.14476, equation 11.
        """

    def informative_rewards(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Drop groups whose rewards (B,) are all equal, for graded rewards without right and wrong."""

    def __getattr__(self, name: str) -> Callable[..., Stage]: ...

class DataNames:
    def join_response(
        self, *, of: str | None = None, id: str | None = None, when: When = ..., after: Sequence[str] = ...
    ) -> Stage:
        """Join prompt and response ids as sequences, with masks and lengths; actions are all response tokens, or
        those of `response_mask`.
        """

    def __getattr__(self, name: str) -> Callable[..., Stage]: ...

class LossNames:
    def bradley_terry(self) -> dict[str, Any]:
        """Return −log σ(s_chosen − s_rejected), (B,): one score and one loss per row, not per token.

        Bradley and Terry 1952, as in InstructGPT, arXiv 2203.02155, equation 1. Aggregated with one token per
        row (offsets 0..B).
        """

    def cispo(
        self, *, low: float = 1.0, high: float = 4.0
    ) -> dict[str, Any]:
        """Return −sg(clip(r, 1 − low, 1 + high))·A·log π: weights are clipped, and every token keeps its gradient.

        MiniMax-M1, arXiv 2506.13585, which sets no lower bound (low = 1) and does not publish its upper bound; 1
        + high = 5 is from ScaleRL, arXiv 2510.13786.
        """

    def clip(
        self, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
    ) -> dict[str, Any]:
        """Return −min(r·A, clip(r, 1 − low, 1 + high)·A); with `dual` c, at most −c·A where A < 0.

        PPO, arXiv 1707.06347, equation 7; high > low is Clip-Higher, DAPO, arXiv 2503.14476, equation 10 (0.2
        and 0.28); dual clip, arXiv 1912.09729.
        """

    def clip_cov(
        self, *, low: float = 0.2, high: float = 0.2
    ) -> dict[str, Any]:
        """Return the clipped surrogate without gradient from tokens of high covariance (1 in `high_covariance`).

        Clip-Cov, arXiv 2505.22617.
        """

    def decoupled(
        self, *, low: float = 0.2, high: float = 0.2, cap: float = 5.0,
        over_cap: Literal["clamp", "mask"] = "clamp"
    ) -> dict[str, Any]:
        """Return −w·min(u·A, clip(u, 1 − low, 1 + high)·A) with u = π/π_prox and w = π_prox/π_behaviour.

        AReaL, arXiv 2505.24298. π_prox is `old_log_probs`, recomputed under the weights at the start of the
        update; π_behaviour is the policy that sampled the tokens. Where w is above `cap` it is clamped, or the
        token is masked (`over_cap`).
        """

    def distillation(self) -> dict[str, Any]:
        """Return −sg(log π_teacher − log π)·log π on tokens sampled from π; its gradient is that of the reverse KL.

        arXiv 2306.13649.
        """

    def dpo(
        self, *, beta: float = 0.1
    ) -> dict[str, Any]:
        """Return −log σ(β·(Σ log π/π_ref chosen − Σ log π/π_ref rejected)) at each token of both rows.

        DPO, arXiv 2305.18290, equation 7.
        """

    def dppo_tv(
        self, *, delta: float = 0.15
    ) -> dict[str, Any]:
        """Return −(π/μ)·A, 0 where A > 0 and π − μ > delta, or A < 0 and π − μ < −delta; μ is the rollout policy.

        The trust region is in total variation: rare tokens may change by large ratios. DPPO, arXiv 2602.04879.
        """

    def gmpo(
        self, *, low: float = 0.4, high: float = 0.4
    ) -> dict[str, Any]:
        """Return −A·(Π of the row's clipped ratios)^(1/|o|), the same number at each of the row's tokens.

        GMPO, arXiv 2507.20673. A row's A is the mean over its tokens; log-ratios are at most `high` where A > 0,
        at least −`low` elsewhere.
        """

    def gspo(
        self, *, low: float = 0.0003, high: float = 0.0004
    ) -> dict[str, Any]:
        """Return −min(s·A, clip(s, 1 − low, 1 + high)·A) with s = exp(mean over the row of log r), in token form.

        GSPO-token, arXiv 2507.18071, section 4.3: s_t = sg(s)·π/sg(π), whose value is s and whose gradient each
        token's own.
        """

    def kl_cov(
        self, *, coef: float = 1.0, estimator: str = "abs"
    ) -> dict[str, Any]:
        """Return −r·A, plus coef·KL(π_old, π) on tokens of high covariance (1 in `high_covariance`, (N,)).

        KL-Cov, arXiv 2505.22617.
        """

    def ptx(self) -> dict[str, Any]:
        """Return −log π of pre-training text, added to a policy loss.

        PPO-ptx, InstructGPT, arXiv 2203.02155, equation 2.
        """

    def reinforce(self) -> dict[str, Any]:
        """Return −A·log π. Williams, "Simple statistical gradient-following algorithms", 1992."""

    def sapo(
        self, *, tau_positive: float = 1.0, tau_negative: float = 1.05
    ) -> dict[str, Any]:
        """Return −(4/τ)·σ(τ(r − 1))·A: a smooth gate; τ depends on the sign of A. SAPO, arXiv 2511.20347."""

    def sft(self) -> dict[str, Any]:
        """Return −log π of given tokens: REINFORCE with every advantage 1."""

    def value(
        self, *, clip: float | None = 0.2
    ) -> dict[str, Any]:
        """Return ½·max((V − R)², (clip(V, V_old ± clip) − R)²) per action token, (N,); without `clip` ½·(V − R)².

        PPO as in its authors' implementation, arXiv 1707.06347. The metrics include the moments for explained
        variance.
        """

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]: ...

class KlNames:
    def abs(
        self, *, coef: float
    ) -> dict[str, Any]:
        """Return |log(π/π_ref)|, (N,)."""

    def k1(
        self, *, coef: float
    ) -> dict[str, Any]:
        """Return log(π/π_ref), (N,): unbiased, may be negative, and its gradient is 0 in expectation."""

    def k2(
        self, *, coef: float
    ) -> dict[str, Any]:
        """Return ½·(log π/π_ref)², (N,): biased in value, unbiased in gradient."""

    def k3(
        self, *, coef: float
    ) -> dict[str, Any]:
        """Return π_ref/π − log(π_ref/π) − 1, (N,): unbiased and never negative. GRPO, arXiv 2402.03300, equation 4."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]: ...

class CorrectionNames:
    def masked(
        self, *, level: Literal["token", "sequence", "geometric"] = "token", low: float = 0.5, high: float = 2.0
    ) -> dict[str, Any]:
        """Return ρ where low ≤ ρ ≤ high and 0 elsewhere, (N,): masked importance sampling, IcePop at level `token`."""

    def sequence_rejection(
        self, *, level: Literal["token", "sequence", "geometric"] = "geometric", low: float = 0.5,
        high: float = 2.0
    ) -> dict[str, Any]:
        """Return 1 where low ≤ ρ ≤ high and 0 elsewhere, (N,): rows on which engine and trainer disagree are
        rejected.
        """

    def truncated(
        self, *, level: Literal["token", "sequence", "geometric"] = "token", cap: float = 2.0
    ) -> dict[str, Any]:
        """Return min(ρ, cap), (N,): truncated importance sampling."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]: ...

advantage: AdvantageNames
shape: ShapeNames
select: SelectNames
data: DataNames
loss: LossNames
kl: KlNames
correction: CorrectionNames
