/* Guesses of a row's next tokens from texts that are likely to repeat: what followed the same words before.

   A book holds one prompt's texts. For each context of 16, 8, 4, 2 and 1 tokens it has a node with the token that has followed it
   most, by a majority vote: an equal token adds a vote, another one removes one, and at none the newcomer takes over.

   How often such a token comes next is measured in cells, by the context's length, the share of votes and the number of
   occurrences. A cell is two floats: tokens that were right, and all. The guess is the token of the most reliable cell. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ORDERS 5
#define DEPTH 16 /* tokens of the longest context */
#define SHARES 8
#define COUNTS 4
#define KEPT 4096.0f /* tokens after which a cell's numbers are halved, so that the latest count most */
static const int LENGTHS[ORDERS] = {1, 2, 4, 8, 16};

typedef struct {
    uint64_t key;
    int32_t token, votes, total, unused;
} node;

typedef struct {
    node *nodes;
    int64_t room, used;
} book;

book *open_book(void) { return calloc(1, sizeof(book)); }

void close_book(book *b) {
    if (b) free(b->nodes);
    free(b);
}

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* The node of a key, or the empty node where it would be. */
static node *node_at(const book *b, uint64_t key) {
    int64_t i = (int64_t)(key & (uint64_t)(b->room - 1));
    while (b->nodes[i].total && b->nodes[i].key != key) i = (i + 1) & (b->room - 1);
    return b->nodes + i;
}

static int has_room(book *b, int64_t more) {
    if (2 * (b->used + more) <= b->room) return 1;
    book wider = {NULL, b->room ? 2 * b->room : 1024, b->used};
    while (wider.room < 2 * (b->used + more)) wider.room *= 2;
    if (!(wider.nodes = calloc((size_t)wider.room, sizeof(node)))) return 0;
    for (int64_t i = 0; i < b->room; i++)
        if (b->nodes[i].total) *node_at(&wider, b->nodes[i].key) = b->nodes[i];
    free(b->nodes);
    *b = wider;
    return 1;
}

/* The keys of the contexts that end before position i of a text; `before` are the DEPTH tokens before its start. */
static void keys_of(const int64_t *before, const int64_t *text, int64_t i, uint64_t *keys) {
    uint64_t hash = 0;
    int order = 0;
    for (int64_t back = 1; back <= DEPTH; back++) {
        int64_t token = i >= back ? text[i - back] : before[DEPTH + i - back];
        hash = mixed(hash + (uint64_t)token + 0x9E3779B97F4A7C15ull);
        if (back == LENGTHS[order]) keys[order++] = mixed(hash + (uint64_t)back);
    }
}

static float *cell_of(float *cells, int order, const node *n) {
    int share = n->votes * SHARES / (n->total + 1), count = n->total < 3 ? n->total - 1 : n->total < 8 ? 2 : 3;
    return cells + 2 * ((order * SHARES + share) * COUNTS + count);
}

/* Reads a text's tokens from .. to into a book, and counts in `cells`, where given, which guesses are right. Returns 0 without memory. */
int read_text(book *b, float *cells, const int64_t *before, const int64_t *text, int64_t from, int64_t to) {
    if (!has_room(b, (to - from) * ORDERS)) return 0;
    for (int64_t i = from; i < to; i++) {
        uint64_t keys[ORDERS];
        keys_of(before, text, i, keys);
        for (int order = 0; order < ORDERS; order++) {
            node *n = node_at(b, keys[order]);
            if (!n->total) {
                *n = (node){keys[order], (int32_t)text[i], 1, 1, 0};
                b->used++;
                continue;
            }
            int right = n->token == (int32_t)text[i];
            if (cells) {
                float *cell = cell_of(cells, order, n);
                cell[0] += (float)right;
                if (++cell[1] > KEPT) cell[0] /= 2, cell[1] /= 2;
            }
            n->total++;
            if (right) n->votes++;
            else if (!n->votes) n->token = (int32_t)text[i], n->votes = 1;
            else n->votes--;
        }
    }
    return 1;
}

/* Reads what each of `rows` rows has drawn since the last call, then guesses up to most[r] next tokens: drafts and the probability
   that all tokens up to each are right, (rows, longest), 0 from the first one that is less likely than `least`. Row r is slot
   slots[r]; before is (slots, DEPTH), tokens (slots, room), read and drawn are (slots). Returns 0 without memory. */
int draft(book **books, float *cells, const int64_t *before, const int64_t *tokens, const int64_t *slots, int64_t *read,
          const int64_t *drawn, const int64_t *most, int64_t *drafts, float *probabilities, int64_t rows, int64_t room,
          int64_t longest, float least) {
    memset(probabilities, 0, sizeof(float) * (size_t)(rows * longest));
    memset(drafts, 0, sizeof(int64_t) * (size_t)(rows * longest));
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r], end = drawn[slot];
        if (!read_text(books[slot], cells, before + slot * DEPTH, tokens + slot * room, read[slot], end)) return 0;
        read[slot] = end;
    }
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
        for (int64_t d = 0; d < most[r] && d < longest; d++) {
            uint64_t keys[ORDERS];
            float best = 0;
            keys_of(text, text, DEPTH + d, keys);
            for (int order = 0; order < ORDERS; order++) {
                const node *n = node_at(books[slot], keys[order]);
                if (!n->total || !n->votes) continue;
                const float *cell = cell_of(cells, order, n);
                if (cell[0] / cell[1] >= best) best = cell[0] / cell[1], text[DEPTH + d] = n->token;
            }
            all *= best;
            if (all < least) break;
            drafts[r * longest + d] = text[DEPTH + d];
            probabilities[r * longest + d] = all;
        }
    }
    return 1;
}
