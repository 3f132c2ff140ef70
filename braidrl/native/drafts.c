/* Guesses of a row's next tokens from texts that are likely to repeat: what followed the same words before.

   A row draws its token by a random number u in [0, 1) that is known beforehand: each token has an interval in [0, 1), as long as
   its probability, and the token is drawn whose interval holds u. Where the same words stood before, the intervals of the tokens
   that were drawn there are known as well, so that u says which of them comes next, or that none does.

   A book holds one prompt's texts. For each context of 16, 8, 4, 2 and 1 tokens it has a node for each token that has followed it,
   with the token's interval when it was drawn last, and how often it came.

   How often a guess is right is measured in cells: by the context's length, by how far u is from the ends of a known interval,
   or without intervals by the token's share of all that came, and by how many came. The guess is the token of the most reliable cell.
   The best of several measurements is too good on average: how often such guesses are right is measured again, in bins of it. */
#include "numbers.h"
#include <string.h>

#define ORDERS 5
#define DEPTH 16 /* tokens of the longest context */
#define SHARES 8
#define INSIDE 4
#define OUTSIDE 3
#define COUNTS 4
#define BINS 20
#define TOKENS 8     /* that are kept of a context */
#define KEPT 4096.0f /* guesses after which numbers are halved, so that the latest count most */
static const int LENGTHS[ORDERS] = {1, 2, 4, 8, 16};
static const float NEAR[INSIDE - 1] = {0.003f, 0.01f, 0.03f}; /* distances of u from the ends of an interval */

/* `low` to `high` is the token's interval; empty if it is not known. */
typedef struct {
    uint64_t key;
    int32_t token, count;
    float low, high;
} node;

typedef struct {
    node *nodes;
    int64_t room, used;
} book;

/* Guesses that were right, and all. */
typedef struct {
    float right, all;
} measured;

/* How a token was drawn: its interval, and the number. */
typedef struct {
    float low, high, uniform;
} draw;

book *open_book(void) { return calloc(1, sizeof(book)); }

void close_book(book *b) {
    if (b) free(b->nodes);
    free(b);
}

/* The node of a key, or the empty node where it would be. */
static node *node_at(const book *b, uint64_t key) {
    int64_t i = (int64_t)(key & (uint64_t)(b->room - 1));
    while (b->nodes[i].count && b->nodes[i].key != key) i = (i + 1) & (b->room - 1);
    return b->nodes + i;
}

/* The node of the token that followed a context first (number 0), second and so on. */
static node *follower(const book *b, uint64_t context, int number) { return node_at(b, mixed(context + (uint64_t)number)); }

static int has_room(book *b, int64_t more) {
    if (2 * (b->used + more) <= b->room) return 1;
    book wider = {NULL, b->room ? 2 * b->room : 1024, b->used};
    while (wider.room < 2 * (b->used + more)) wider.room *= 2;
    if (!(wider.nodes = calloc((size_t)wider.room, sizeof(node)))) return 0;
    for (int64_t i = 0; i < b->room; i++)
        if (b->nodes[i].count) *node_at(&wider, b->nodes[i].key) = b->nodes[i];
    free(b->nodes);
    *b = wider;
    return 1;
}

/* The contexts that end before position i of a text; `before` are the DEPTH tokens before its start. */
static void contexts_of(const int64_t *before, const int64_t *text, int64_t i, uint64_t *contexts) {
    uint64_t hash = 0;
    int order = 0;
    for (int64_t back = 1; back <= DEPTH; back++) {
        int64_t token = i >= back ? text[i - back] : before[DEPTH + i - back];
        hash = mixed(hash + (uint64_t)token + INCREMENT);
        if (back == LENGTHS[order]) contexts[order++] = mixed(hash + (uint64_t)back);
    }
}

static int step_of(float distance, int most) {
    int step = 0;
    while (step < most && distance >= NEAR[step]) step++;
    return step;
}

static void measure(measured *m, int is_right) {
    m->right += (float)is_right;
    if (++m->all > KEPT) m->right /= 2, m->all /= 2;
}

/* The cell of the token that is likeliest to follow a context where u is `uniform`, or unknown below 0; NULL if nothing has. */
static measured *cell_of(const book *b, measured *cells, int order, uint64_t context, float uniform, int32_t *token) {
    const node *most = NULL, *nearest = NULL;
    float margin = -2; /* of u from the nearest end, negative outside of the interval */
    int total = 0;
    for (int i = 0; i < TOKENS; i++) {
        const node *n = follower(b, context, i);
        if (!n->count) break;
        total += n->count;
        if (!most || n->count > most->count) most = n;
        if (uniform < 0 || n->low >= n->high) continue;
        float above = uniform - n->low, below = n->high - uniform, end = above < below ? above : below;
        if (end > margin) margin = end, nearest = n;
    }
    if (!most) return NULL;
    int kind = most->count * SHARES / (total + 1), count = total < 3 ? total - 1 : total < 8 ? 2 : 3;
    if (nearest) kind = margin >= 0 ? SHARES + step_of(margin, INSIDE - 1) : SHARES + INSIDE + step_of(-margin, OUTSIDE - 1);
    *token = nearest ? nearest->token : most->token;
    return cells + ((order * (SHARES + INSIDE + OUTSIDE) + kind) * COUNTS + count);
}

/* The bin of guesses whose most reliable cell is right so often; half as many wrong guesses are two bins further. */
static measured *bin_of(measured *bins, float reliability) {
    int bin = (int)(-2 * log2f(1.0001f - reliability));
    return bins + (bin < BINS ? bin : BINS - 1);
}

/* The cells of the tokens that are likeliest to follow these contexts, each NULL where nothing has; the most reliable one's token
   is the guess. Returns the guess's bin, or NULL without a guess. */
static measured *guess_of(const book *b, measured *cells, measured *bins, const uint64_t *contexts, float uniform, measured **of,
                          int32_t *tokens, int64_t *guess) {
    float best = 0;
    for (int order = 0; order < ORDERS; order++) {
        const measured *cell = of[order] = cell_of(b, cells, order, contexts[order], uniform, tokens + order);
        if (cell && cell->right / cell->all >= best) best = cell->right / cell->all, *guess = tokens[order];
    }
    return best > 0 ? bin_of(bins, best) : NULL;
}

/* Counts a token that follows a context; where TOKENS others are known, it takes the place of the last one. */
static void add(book *b, uint64_t context, int32_t token, const draw *drawn) {
    int number = 0;
    node *n = follower(b, context, 0);
    while (n->count && n->token != token && number + 1 < TOKENS) n = follower(b, context, ++number);
    if (!n->count) b->used++;
    if (!n->count || n->token != token) *n = (node){mixed(context + (uint64_t)number), token, 0, 0, 0};
    n->count++;
    if (drawn && drawn->low < drawn->high) n->low = drawn->low, n->high = drawn->high;
}

/* Reads a text's tokens from .. to into a book, with how they were drawn, or without; measures in `cells` and `bins`, where given,
   which guesses are right. Returns 0 without memory. */
int read_text(book *b, measured *cells, measured *bins, const int64_t *before, const int64_t *text, const draw *drawn, int64_t from,
              int64_t to) {
    if (!has_room(b, (to - from) * ORDERS)) return 0;
    for (int64_t i = from; i < to; i++) {
        uint64_t contexts[ORDERS];
        contexts_of(before, text, i, contexts);
        float uniform = drawn && drawn[i].low < drawn[i].high ? drawn[i].uniform : -1;
        int64_t guess;
        int32_t tokens[ORDERS];
        measured *of[ORDERS] = {NULL}, *bin = cells ? guess_of(b, cells, bins, contexts, uniform, of, tokens, &guess) : NULL;
        if (bin) measure(bin, guess == text[i]);
        for (int order = 0; order < ORDERS; order++) {
            if (of[order]) measure(of[order], tokens[order] == (int32_t)text[i]);
            add(b, contexts[order], (int32_t)text[i], drawn ? drawn + i : NULL);
        }
    }
    return 1;
}

/* Reads what each of `rows` rows has drawn since the last call. Row r is slot slots[r]; before is (slots, DEPTH), tokens and draws are
   (slots, room), and read and drawn, the numbers of drawn tokens, are (slots). Returns 0 without memory. */
int read_rows(book **books, measured *cells, measured *bins, const int64_t *before, const int64_t *tokens, const draw *draws,
              const int64_t *slots, int64_t *read, const int64_t *drawn, int64_t rows, int64_t room) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r], first = slot * room;
        if (!read_text(books[slot], cells, bins, before + slot * DEPTH, tokens + first, draws + first, read[slot], drawn[slot])) return 0;
        read[slot] = drawn[slot];
    }
    return 1;
}

/* Guesses the next tokens of rows as in `read_rows`, of which the last before a row's limit is of no use: drafts and the probability
   that all tokens up to each are right, (rows, longest), 0 from the first one that is less likely than `least`. The limits of drawn
   tokens, and the keys and first index of the numbers that draw them, are (slots). */
void draft(book **books, measured *cells, measured *bins, const int64_t *before, const int64_t *tokens, const int64_t *slots,
           const int64_t *drawn, const int64_t *limits, const int64_t *keys, const int64_t *first_draws, int64_t *drafts,
           float *probabilities, int64_t rows, int64_t room, int64_t longest, float least) {
    memset(probabilities, 0, sizeof(float) * (size_t)(rows * longest));
    memset(drafts, 0, sizeof(int64_t) * (size_t)(rows * longest));
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r], end = drawn[slot];
        if (!books[slot]->room) continue;
        /* the last DEPTH tokens, then the guesses */
        int64_t text[DEPTH + longest];
        for (int64_t i = 0; i < DEPTH; i++) {
            int64_t at = end - DEPTH + i;
            text[i] = at >= 0 ? tokens[slot * room + at] : before[slot * DEPTH + DEPTH + at];
        }
        float all = 1;
        for (int64_t d = 0; d < limits[slot] - end - 1 && d < longest; d++) {
            uint64_t contexts[ORDERS];
            float uniform = (float)uniform_of(keys[slot], first_draws[slot] + end + d);
            contexts_of(text, text, DEPTH + d, contexts);
            int32_t of_orders[ORDERS];
            measured *of[ORDERS];
            const measured *bin = guess_of(books[slot], cells, bins, contexts, uniform, of, of_orders, text + DEPTH + d);
            all *= bin ? bin->right / bin->all : 0;
            if (all < least) break;
            drafts[r * longest + d] = text[DEPTH + d];
            probabilities[r * longest + d] = all;
        }
    }
}
