import sys; sys.path.insert(0,"/work/wt/plan/tests/oracle")
from count_presets import parameters
def types(n, full, other): return [ "full_attention" if i in full else other for i in range(n)]
A=[2,5,8,10,12,14]
def lfm(h, ff, heads, n=16, full=A, **m): return dict(model_type="lfm2", hidden_size=h, intermediate_size=ff, block_ff_dim=ff, num_hidden_layers=n, num_attention_heads=heads, num_key_value_heads=8, layer_types=types(n,full,"conv"), vocab_size=65536, **m)
def q35(h, ff, n, heads, kv, v, tied): return dict(model_type="qwen3_5_text", hidden_size=h, intermediate_size=ff, num_hidden_layers=n, num_attention_heads=heads, num_key_value_heads=kv, linear_num_value_heads=v, tie_word_embeddings=tied)
G=types(40,(5,15,25,35),"mamba"); G=["attention" if t!="mamba" else t for t in G]
def gr(h, ff, sh, e, k, heads, mh, kv=4,**m): return dict(model_type="granitemoehybrid", hidden_size=h, intermediate_size=ff, shared_intermediate_size=sh, num_local_experts=e, num_experts_per_tok=k, num_attention_heads=heads, num_key_value_heads=kv, num_hidden_layers=40, layer_types=G, mamba_n_heads=mh, mamba_d_state=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, vocab_size=100352, tie_word_embeddings=True, **m)
def g4(h, ff, n, heads, kv, period, **m):
    t=["full_attention" if (i+1)%period==0 else "sliding_attention" for i in range(n)]
    return dict(model_type="gemma4_text", hidden_size=h, intermediate_size=ff, num_hidden_layers=n, num_attention_heads=heads, num_key_value_heads=kv, layer_types=t, **m)
C={
 "lfm2-350m": lfm(1024,6656,16), "lfm2-700m": lfm(1536,10240,24), "lfm2-1.2b": lfm(2048,12288,32),
 "lfm2-2.6b": lfm(2048,10752,32,30,[2,6,9,12,15,18,21,24,27],block_auto_adjust_ff_dim=False),
 "lfm2-8b-a1b": dict(model_type="lfm2_moe", num_hidden_layers=24, layer_types=types(24,[2,6,10,14,18,21],"conv")),
 "qwen3.5-0.8b": q35(1024,3584,24,8,2,16,True), "qwen3.5-2b": q35(2048,6144,24,8,2,16,True), "qwen3.5-4b": q35(2560,9216,32,16,4,32,True), "qwen3.5-9b": q35(4096,12288,32,16,4,32,False), "qwen3.5-27b": q35(5120,17408,64,24,4,48,False),
 "qwen3.5-35b-a3b": dict(model_type="qwen3_5_moe_text", num_hidden_layers=40, hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8, linear_num_value_heads=32),
 "qwen3-next-80b-a3b": dict(model_type="qwen3_next"),
 "granite-4-h-tiny": gr(1536,512,1024,64,6,12,48), "granite-4-h-small": gr(4096,768,1536,72,10,32,128,8), "granite-4-h-micro": gr(2048,8192,8192,0,0,32,64,8),
 "gemma-4-e2b": g4(1536,6144,35,8,1,5,num_kv_shared_layers=20,use_double_wide_mlp=True),
 "gemma-4-e4b": g4(2560,10240,42,8,2,6,num_kv_shared_layers=18),
 "gemma-4-26b-a4b": g4(2816,2112,30,16,8,6,attention_k_eq_v=True,num_global_key_value_heads=2,hidden_size_per_layer_input=0,enable_moe_block=True,num_experts=128,top_k_experts=8,moe_intermediate_size=704,sliding_window=1024),
 "gemma-4-31b": g4(5376,21504,60,32,16,6,attention_k_eq_v=True,num_global_key_value_heads=4,hidden_size_per_layer_input=0,sliding_window=1024),
 "gpt-oss-20b": dict(model_type="gpt_oss", num_hidden_layers=24, num_local_experts=32), "gpt-oss-120b": dict(model_type="gpt_oss"),
 "smollm3-3b": dict(model_type="smollm3"),
 "phi-4-mini": dict(model_type="phi3", hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=24, num_key_value_heads=8, vocab_size=200064, tie_word_embeddings=True),
 "olmo-3-7b": dict(model_type="olmo3", vocab_size=100278), "olmo-3-7b'": dict(model_type="olmo3", vocab_size=100352), "olmo-3-32b": dict(model_type="olmo3", vocab_size=100278, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8),
 "ministral-3-3b": dict(model_type="ministral3", hidden_size=3072, intermediate_size=9216, num_hidden_layers=26, tie_word_embeddings=True),
 "ministral-3-8b": dict(model_type="ministral3"),
 "ministral-3-14b": dict(model_type="ministral3", hidden_size=5120, intermediate_size=16384, num_hidden_layers=40),
 "command-r7b": dict(model_type="cohere2", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
}
import sys
for n in (sys.argv[1:] or C):
    try: print(f"{n}: {parameters(C[n]):_}", flush=True)
    except Exception as e: print(n, "ERR", repr(e)[:300], flush=True)
