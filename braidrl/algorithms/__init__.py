"""Pure functions on flat tensors and offsets: everything that a paper calls the algorithm. Imports only torch.

A registered function reads columns by the names of its positional parameters. B are the rows, N their action tokens. One number per
action token comes as a `Ragged` to advantages, shapes and their sums, and flat, (N,), beside the rows' `offsets`, to losses,
corrections and KL estimators.

Columns:
    log_probs: log π under the weights that are trained, with gradient, per action token.
    old_log_probs: log π_old under the weights that start the update, per action token.
    rollout_log_probs: log π as the engine sampled, per action token.
    ref_log_probs: log π_ref under the reference (of a teacher in distillation), per action token.
    values: V as the critic says it, per action token; with gradient in its loss.
    old_values: V_old, said when the returns were made, per action token.
    returns: What the critic learns to say, per action token.
    advantages: A per action token; in a loss a row's `advantage` stands at each of its tokens.
    advantage: A per row, (B,).
    cost_advantages: A of the costs, per action token.
    reward: R per row, (B,).
    greedy_reward: R of the same prompt's greedy response, (B,).
    token_rewards: R per action token, where a stage wrote it.
    cost: The cost per row, (B,).
    scores: What a reward model says, with gradient, (B,).
    correct: 1 for a right sample and 0 for a wrong one, (B,).
    group: Number of each row's prompt, (B,) int64.
    sample: Number of each row within its group, (B,) int64.
    offsets: Where each row's action tokens begin and the last one's end, (B + 1,) int64.
    action_tokens: Action tokens of each row, (B,) int64.
    finish_reason: How each row ended, (B,); 1 is at the length limit.
    statistics_mask: 0 for rows that do not count in statistics, (B,).
    loss_mask: 0 for rows that do not count in losses, (B,).
    covariance: Of log π_old and A, per action token.
    high_covariance: 1 for tokens of high covariance, 0 for others, per action token.
    prompt: Ids of each row's prompt, ragged.
    response: Ids of each row's given response, ragged.
"""
