// What llama.cpp's layer for multi-token prediction says, as its draft-mtp has it run: see
// record_mtp.py. Usage: draft_mtp MODEL.gguf DRAFTS OUT TOKEN...
//
// The tokens go through the model, then each with the hidden row of the one before it (the first
// with zeros) through the layer; DRAFTS - 1 further passes take the likeliest token and the layer's
// own row. OUT gets the layer's logits of all passes, float32 [TOKENS + DRAFTS - 1, vocabulary].

#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(bool holds, const char *what) {
    if (holds)
        return;
    std::fprintf(stderr, "draft_mtp: %s\n", what);
    std::exit(1);
}

int main(int argc, char **argv) {
    check(argc > 4, "MODEL.gguf DRAFTS OUT TOKEN...");
    std::vector<llama_token> tokens;
    for (int i = 4; i < argc; ++i)
        tokens.push_back(llama_token(std::atoi(argv[i])));
    const int drafts = std::atoi(argv[2]), count = int(tokens.size());

    llama_backend_init();
    llama_model_params of_model = llama_model_default_params();
    of_model.load_mtp = true;
    llama_model *model = llama_model_load_from_file(argv[1], of_model);
    check(model != nullptr, "cannot load the model");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 512;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *target = llama_init_from_model(model, params);
    params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other = target;
    llama_context *layer = llama_init_from_model(model, params);
    check(target != nullptr && layer != nullptr, "cannot make the contexts");
    llama_set_embeddings_nextn(target, true, false);
    llama_set_embeddings_nextn(layer, true, true);
    const size_t width = size_t(llama_model_n_embd(model));
    const size_t vocab = size_t(llama_vocab_n_tokens(llama_model_get_vocab(model)));

    llama_batch_ext *batch = llama_batch_ext_init(target);
    for (llama_pos at = 0; at < count; ++at) {
        check(llama_batch_ext_add_token(batch, 0, tokens[size_t(at)]) == at, "token");
        check(llama_batch_ext_set_pos(batch, at, &at), "position");
        check(llama_batch_ext_set_output_logits(batch, at, true), "logits");
    }
    check(llama_process(target, LLAMA_PROCESS_TYPE_DECODE, batch) == 0, "the model's pass");
    std::vector<float> rows(size_t(count) * width); // of the token before
    std::copy_n(llama_get_embeddings_nextn(target), size_t(count - 1) * width, rows.data() + width);

    FILE *out = std::fopen(argv[3], "wb");
    check(out != nullptr, "cannot write");
    llama_batch_ext *pass = llama_batch_ext_init(layer);
    llama_pos at = 0;
    for (int i = 0; i < drafts; ++i) {
        llama_batch_ext_clear(pass);
        const int size = int(rows.size() / width);
        for (int row = 0; row < size; ++row, ++at) {
            check(llama_batch_ext_add_token(pass, 0, tokens[size_t(at)]) == row, "token");
            check(llama_batch_ext_set_pos(pass, row, &at), "position");
            const llama_embd hidden = {rows.data() + size_t(row) * width, 1, width};
            check(llama_batch_ext_set_embd_token(pass, row, hidden), "hidden row");
            check(llama_batch_ext_set_output_logits(pass, row, true), "logits");
        }
        check(llama_process(layer, LLAMA_PROCESS_TYPE_DECODE, pass) == 0, "the layer's pass");
        for (int row = 0; row < size; ++row)
            std::fwrite(llama_get_logits_ith(layer, row), sizeof(float), vocab, out);
        const float *last = llama_get_logits_ith(layer, size - 1);
        tokens.push_back(llama_token(std::max_element(last, last + vocab) - last));
        const float *own = llama_get_embeddings_nextn_ith(layer, size - 1);
        rows.assign(own, own + width);
    }
    std::fclose(out);
    return 0;
}
