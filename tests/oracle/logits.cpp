// What llama.cpp's graph says of a text: see record_llama_cpp.py. Usage: logits MODEL.gguf OUT
// TOKEN...
//
// The tokens go through the model one by one, on one thread, with keys and values in float16 and
// no flash attention, as Octavo's tests have them. OUT gets the logits, float32 [TOKENS,
// vocabulary].

#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(bool holds, const char *what) {
    if (holds)
        return;
    std::fprintf(stderr, "logits: %s\n", what);
    std::exit(1);
}

int main(int argc, char **argv) {
    check(argc > 3, "MODEL.gguf OUT TOKEN...");
    std::vector<llama_token> tokens;
    for (int i = 3; i < argc; ++i)
        tokens.push_back(llama_token(std::atoi(argv[i])));

    llama_backend_init();
    llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    check(model != nullptr, "cannot load the model");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F16;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context *context = llama_init_from_model(model, params);
    check(context != nullptr, "cannot make the context");
    const size_t vocab = size_t(llama_vocab_n_tokens(llama_model_get_vocab(model)));

    std::FILE *out = std::fopen(argv[2], "wb");
    check(out != nullptr, "cannot write");
    for (llama_token &token : tokens) {
        check(llama_decode(context, llama_batch_get_one(&token, 1)) == 0, "a pass");
        std::fwrite(llama_get_logits_ith(context, 0), sizeof(float), vocab, out);
    }
    std::fclose(out);
    return 0;
}
