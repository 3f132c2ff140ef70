"""Pure functions on flat tensors and offsets: everything that a paper calls the algorithm. Imports only torch.

A registered function reads columns by the names of its positional parameters. B is the number of rows, N of their
action tokens. Advantages, shapes and their sums receive one number per action token as a `Ragged`. Losses, corrections
and KL estimators receive it flat, (N,), beside the rows' `offsets`.

Columns:
    log_probs: log π under the weights in training, with gradient, per action token.
    old_log_probs: log π_old under the weights at the start of the update, per action token.
    rollout_log_probs: log π at sampling, from the engine, per action token.
    ref_log_probs: log π_ref under the reference (the teacher in distillation), per action token.
    values: V, the critic's prediction, per action token; with gradient in its loss.
    old_values: V_old, the prediction from which the returns were computed, per action token.
    returns: Targets of the critic, per action token.
    advantages: A per action token; in a loss a row's `advantage` is repeated at each of its tokens.
    advantage: A per row, (B,).
    cost_advantages: A of the costs, per action token.
    reward: R per row, (B,).
    greedy_reward: R of the same prompt's greedy response, (B,).
    token_rewards: R per action token, where a stage wrote it.
    cost: The cost per row, (B,).
    scores: Scores of a reward model, with gradient, (B,).
    correct: 1 for a right sample and 0 for a wrong one, (B,).
    group: Number of each row's prompt, (B,) int64.
    sample: Number of each row within its group, (B,) int64.
    offsets: Start of each row's action tokens and the end of the last row's, (B + 1,) int64.
    action_tokens: Number of action tokens of each row, (B,) int64.
    finish_reason: Reason why each row ended, (B,); 1 is the length limit.
    statistics_mask: 0 for rows excluded from statistics, (B,).
    loss_mask: 0 for rows excluded from losses, (B,).
    covariance: Contribution to the covariance of log π_old and A, per action token.
    high_covariance: 1 for tokens of high covariance, 0 for others, per action token.
    prompt: Ids of each row's prompt, ragged.
    response: Ids of each row's given response, ragged.
"""
