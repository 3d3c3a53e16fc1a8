"""Writes the committed parity cases: for each architecture a tiny random model (weights that bf16 represents exactly),
rows of token ids, an initial PEFT adapter, and the training results of transformers + PEFT + torch.optim.AdamW.

usage: make_parity.py OUT [ARCH ...]      (tests/golden/parity was made with torch 2.15.0, transformers 5.23.0, peft 0.21.2)
ARCH: llama linear llama3 mistral qwen2 qwen3 llamacls qwen3cls mistralwin qwen3win gemma3 gemma3cls smollm3 granite
      olmo2 olmo3 ministral3 glm4 glm4cls phi3 phi3long gemma3vl mistral3vl qwen3vl qwen3moe qwen3moeone
      qwen35 qwen35one qwen35vl qwen35cls layers patterns patternsvl weighted lfm2 lfm2taps tokens tokensboth tokenscls tokensweighted
      ends endscls endsweighted granite4 granite4nope phi3longer newtokens newtokensboth gptoss gptossmx qwen35moe qwen35moeone
      qwen35moevl
      (default: all; the last ten with transformers 5.24.0)
"""
import json, math, os, random, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification,
                          Gemma3Config, Gemma3TextConfig, Glm4Config, GptOssConfig, GraniteConfig, GraniteMoeHybridConfig, Lfm2Config, LlamaConfig, Ministral3Config, Mistral3Config,
                          MistralConfig, Olmo2Config, Olmo3Config, Phi3Config, Qwen2Config, Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, Qwen3VLConfig, SmolLM3Config,
                          get_cosine_schedule_with_warmup)

STEPS, BATCH, LR, CLIP, WARMUP = 4, 4, 3e-3, 1.0, 1
SIZES = dict(vocab_size=120, hidden_size=48, intermediate_size=88, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, eos_token_id=0, pad_token_id=1,
             bos_token_id=None)
CONVOLVED = {key: value for key, value in SIZES.items() if key != 'rms_norm_eps'}
RULE = dict(linear_key_head_dim=16, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_conv_kernel_dim=4)
SIZES_OF_EXPERTS = {key: value for key, value in SIZES.items() if key != 'intermediate_size'}
EXPERTS_OF_ONE = 3
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=28)
DENSE = dict(layer_types=['attention'] * 2, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=72,
             embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.1,
             mamba_n_heads=4)
CONFIGS = {
    'llama': lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=10000.0),
    'linear': lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
                                  rope_parameters=dict(rope_type='linear', rope_theta=10000.0, factor=2.5)),
    'llama3': lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=dict(
        rope_type='llama3', rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)),
    'mistral': lambda: MistralConfig(**SIZES, head_dim=12, sliding_window=None, tie_word_embeddings=False),
    'qwen2': lambda: Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=1000000.0),
    'qwen3': lambda: Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True, rope_theta=1000000.0),
    # windows shorter than the rows
    'mistralwin': lambda: MistralConfig(**SIZES, head_dim=12, sliding_window=7, tie_word_embeddings=False),
    'qwen3win': lambda: Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True, use_sliding_window=True,
                                    sliding_window=5, max_window_layers=1),
    # a sliding layer and a full one with another rotary base and scaled frequencies; scores divided by sqrt(20)
    'gemma3': lambda: Gemma3TextConfig(**SIZES, head_dim=12, sliding_window=6, query_pre_attn_scalar=20,
                                       layer_types=['sliding_attention', 'full_attention'], rope_parameters=dict(
        full_attention=dict(rope_type='linear', rope_theta=1000000.0, factor=8.0),
        sliding_attention=dict(rope_type='default', rope_theta=10000.0))),
    'smollm3': lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0], tie_word_embeddings=True),
    'granite': lambda: GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
                                     attention_multiplier=0.1, tie_word_embeddings=True),
    'granite4': lambda: GraniteMoeHybridConfig(**SIZES, **DENSE, position_embedding_type='rope', rope_theta=1000000.0,
                                               tie_word_embeddings=True),
    # layers without rotation; biases of attention
    'granite4nope': lambda: GraniteMoeHybridConfig(**SIZES, **DENSE, position_embedding_type='nope', attention_bias=True,
                                                   tie_word_embeddings=False),
    'olmo2': lambda: Olmo2Config(**SIZES, tie_word_embeddings=False),
    'olmo3': lambda: Olmo3Config(**SIZES, sliding_window=6, layer_types=['sliding_attention', 'full_attention'],
                                 rope_parameters=dict(
        full_attention=dict(rope_type='yarn', rope_theta=500000.0, factor=8.0, original_max_position_embeddings=32,
                            beta_fast=32.0, beta_slow=1.0, attention_factor=1.2),
        sliding_attention=dict(rope_type='default', rope_theta=500000.0)), tie_word_embeddings=False),
    'ministral3': lambda: Ministral3Config(**SIZES, head_dim=12, tie_word_embeddings=True, rope_parameters=dict(
        rope_type='yarn', rope_theta=1000000.0, factor=16.0, original_max_position_embeddings=6, beta_fast=32.0,
        beta_slow=0.05, mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.1)),
    'glm4': lambda: Glm4Config(**SIZES, head_dim=12, partial_rotary_factor=0.5, attention_bias=True,
                               tie_word_embeddings=False),
    'phi3': lambda: Phi3Config(**SIZES, partial_rotary_factor=0.75, sliding_window=6, tie_word_embeddings=False),
    # rows are shorter than the original length: the short factors
    'phi3long': lambda: Phi3Config(**SIZES, tie_word_embeddings=True, original_max_position_embeddings=32,
                                   rope_parameters=dict(rope_type='longrope', rope_theta=10000.0,
                                                        short_factor=[1.0, 1.25, 2.5, 3.75],
                                                        long_factor=[1.5, 4.0, 20.0, 50.0])),
    # rows on both sides of the original length
    'phi3longer': lambda: Phi3Config(**SIZES, partial_rotary_factor=0.75, tie_word_embeddings=False,
                                     original_max_position_embeddings=14, rope_parameters=dict(
        rope_type='longrope', rope_theta=10000.0, partial_rotary_factor=0.75, short_factor=[1.0, 1.25, 2.5],
        long_factor=[1.5, 4.0, 20.0])),
    'qwen3moe': lambda: Qwen3MoeConfig(**SIZES, head_dim=12, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20,
                                       norm_topk_prob=True, tie_word_embeddings=False, rope_theta=1000000.0),
    # a layer with one feed-forward; weights that are not divided by their sum; one expert of three
    'qwen3moeone': lambda: Qwen3MoeConfig(**SIZES, head_dim=12, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=36,
                                          norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True),
    'lfm2': lambda: Lfm2Config(**dict(CONVOLVED, num_hidden_layers=3), layer_types=['conv', 'full_attention', 'conv'],
                               block_auto_adjust_ff_dim=False, tie_word_embeddings=True),
    # four taps; attention in the layers that `full_attn_idxs` names; a feed-forward of size 80
    'lfm2taps': lambda: Lfm2Config(**CONVOLVED, full_attn_idxs=[0], conv_L_cache=4, block_ffn_dim_multiplier=1.3,
                                   block_multiple_of=8, tie_word_embeddings=False),
    # two value heads for each key head; a quarter of each head is rotated
    'qwen35': lambda: Qwen3_5TextConfig(**dict(SIZES, num_hidden_layers=3), head_dim=16, **RULE, tie_word_embeddings=True,
                                        layer_types=['linear_attention', 'full_attention', 'linear_attention']),
    # as many key heads as value heads, three taps, half of each head is rotated; attention in every second layer
    'qwen35one': lambda: Qwen3_5TextConfig(**SIZES, head_dim=12, **dict(RULE, linear_num_value_heads=2, linear_conv_kernel_dim=3),
                                           full_attention_interval=2, tie_word_embeddings=False, rope_parameters=dict(
        rope_type='default', rope_theta=10000.0, partial_rotary_factor=0.5)),
    # experts and one of another size that computes every token; the same with experts in joined tensors, one for each token
    'qwen35moe': lambda: Qwen3_5MoeTextConfig(**EXPERTS, **dict(SIZES_OF_EXPERTS, num_hidden_layers=3), head_dim=16, **RULE, tie_word_embeddings=False,
                                              layer_types=['linear_attention', 'full_attention', 'linear_attention']),
    'qwen35moeone': lambda: Qwen3_5MoeTextConfig(**dict(EXPERTS, num_experts=EXPERTS_OF_ONE, num_experts_per_tok=1, shared_expert_intermediate_size=20),
                                                 **SIZES_OF_EXPERTS, head_dim=16, **RULE, full_attention_interval=2, tie_word_embeddings=True),
    # experts of a layer in joined tensors; a sliding layer and a full one; sinks; frequencies scaled without whole ends
    'gptoss': lambda: GptOssConfig(**SIZES, head_dim=12, num_local_experts=5, num_experts_per_tok=3, sliding_window=6,
                                   tie_word_embeddings=False, rope_parameters=dict(
        rope_type='yarn', rope_theta=150000.0, factor=8.0, original_max_position_embeddings=32, beta_fast=32.0,
        beta_slow=1.0, truncate=False)),
    # the experts in MXFP4, with values beyond the limits of the clamped SwiGLU; two experts of three
    'gptossmx': lambda: GptOssConfig(**dict(SIZES, hidden_size=64, intermediate_size=32), head_dim=16, num_local_experts=3,
                                     num_experts_per_tok=2, sliding_window=5, attention_bias=False, tie_word_embeddings=True,
                                     rope_parameters=dict(rope_type='default', rope_theta=10000.0)),
    'layers': lambda: LlamaConfig(**dict(SIZES, num_hidden_layers=3), tie_word_embeddings=True),
    'weighted': lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    # rows of some tokens are trained: in a tied embedding that is scaled, in embedding and head, with row weights
    'tokens': lambda: CONFIGS['gemma3'](), 'tokensweighted': lambda: CONFIGS['weighted'](),
    'tokensboth': lambda: CONFIGS['qwen2untied'](),
    # the same with tokens that the saved model does not have
    'newtokens': lambda: CONFIGS['gemma3'](), 'newtokensboth': lambda: CONFIGS['qwen2untied'](),
    # adapters on embedding and head: tied with scaled embeddings, a classifier, untied with row weights
    'ends': lambda: CONFIGS['gemma3'](), 'endsweighted': lambda: CONFIGS['qwen2untied'](),
    'qwen2untied': lambda: Qwen2Config(**SIZES, tie_word_embeddings=False, rope_theta=1000000.0),
    'patterns': lambda: Qwen2Config(**dict(SIZES, num_hidden_layers=3), tie_word_embeddings=False)}
# checkpoints with a vision tower, of which the text model is trained
TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
WRAPPED = {
    'gemma3vl': lambda: Gemma3Config(text_config=CONFIGS['gemma3']().to_dict(), vision_config=TOWER, mm_tokens_per_image=1),
    'mistral3vl': lambda: Mistral3Config(text_config=CONFIGS['ministral3']().to_dict(), tie_word_embeddings=False,
                                         vision_config=dict(TOWER, model_type='pixtral', head_dim=8)),
    'qwen3vl': lambda: Qwen3VLConfig(text_config=dict(SIZES, head_dim=12, rope_parameters=dict(
        rope_type='default', rope_theta=5000000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, patch_size=8,
                           deepstack_visual_indexes=[], num_position_embeddings=16), tie_word_embeddings=True)}
WRAPPED['qwen35vl'] = lambda: Qwen3_5Config(text_config=CONFIGS['qwen35']().to_dict(), tie_word_embeddings=True, vision_config=dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, patch_size=8, num_position_embeddings=16))
WRAPPED['qwen35moevl'] = lambda: Qwen3_5MoeConfig(text_config=CONFIGS['qwen35moe']().to_dict(), tie_word_embeddings=False, vision_config=dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48, patch_size=8, num_position_embeddings=16))
WRAPPED['patternsvl'] = WRAPPED['gemma3vl']
CONVOLUTION = ['q_proj', 'k_proj', 'v_proj', 'out_proj', 'in_proj', 'w1', 'w2', 'w3']
SEVEN = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
DELTA_RULE = ['in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a', 'out_proj']
LORA = {  # rank, alpha, targets, rsLoRA: different for each architecture
    'llama': (3, 6, 'all', False), 'linear': (4, 4, 'all', True), 'llama3': (4, 8, 'all', False),
    'mistral': (4, 8, ['q_proj', 'v_proj'], False), 'qwen2': (4, 8, 'all', False), 'qwen3': (5, 8, 'all', True),
    'llamacls': (4, 8, ['gate_proj', 'down_proj'], False), 'qwen3cls': (4, 8, 'all', False),
    'mistralwin': (4, 8, 'all', False), 'qwen3win': (3, 8, ['q_proj', 'k_proj', 'o_proj'], False),
    'gemma3': (4, 8, 'all', False), 'gemma3cls': (3, 4, 'all', False), 'smollm3': (4, 8, 'all', False),
    'granite': (4, 8, 'all', False), 'olmo2': (4, 8, 'all', False), 'olmo3': (3, 8, 'all', True),
    'ministral3': (4, 8, 'all', False),
    'glm4': (4, 8, ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_up_proj', 'down_proj'], False),
    'glm4cls': (3, 8, ['k_proj', 'gate_up_proj'], True),
    'phi3': (4, 8, ['qkv_proj', 'o_proj', 'gate_up_proj', 'down_proj'], False),
    'phi3long': (3, 8, ['qkv_proj', 'down_proj'], True),
    'gemma3vl': (4, 8, 'all', False), 'mistral3vl': (3, 6, 'all', False),
    'qwen3vl': (4, 8, ['q_proj', 'v_proj', 'down_proj'], False),
    'qwen3moe': (4, 8, ['q_proj', 'k_proj', 'v_proj', 'o_proj'], False),
    'qwen3moeone': (3, 8, ['q_proj', 'k_proj', 'v_proj', 'o_proj'], True),
    'layers': (4, 8, 'all', False), 'patterns': (4, 8, 'all', True),
    'patternsvl': (3, 6, 'all', False), 'weighted': (4, 8, 'all', False),
    'lfm2': (4, 8, CONVOLUTION, False), 'lfm2taps': (3, 8, ['in_proj', 'out_proj', 'w2'], True),
    'tokens': (3, 6, ['q_proj', 'down_proj'], False), 'tokensboth': (3, 6, ['v_proj'], False),
    'tokenscls': (2, 4, ['v_proj'], False), 'tokensweighted': (2, 4, ['q_proj'], True),
    'ends': (3, 6, ['v_proj', 'embed_tokens', 'lm_head'], False), 'endscls': (2, 4, ['q_proj', 'embed_tokens'], True),
    'endsweighted': (2, 4, ['k_proj', 'embed_tokens', 'lm_head'], False),
    'qwen35': (4, 8, [*SEVEN, *DELTA_RULE], False), 'qwen35vl': (3, 6, [*SEVEN, *DELTA_RULE], False),
    'qwen35one': (3, 8, ['in_proj_a', 'in_proj_qkv', 'q_proj', 'out_proj'], True),
    'qwen35cls': (3, 4, ['in_proj_z', 'in_proj_b', 'out_proj', 'o_proj'], False),
    'granite4': (4, 8, [*SEVEN[:4], 'input_linear', 'output_linear'], False),
    'granite4nope': (3, 8, ['k_proj', 'input_linear', 'output_linear'], True),
    'phi3longer': (4, 8, ['qkv_proj', 'o_proj', 'gate_up_proj'], False),
    'newtokens': (3, 6, ['q_proj', 'up_proj'], False), 'newtokensboth': (3, 6, ['v_proj'], False),
    'gptoss': (4, 8, ['q_proj', 'k_proj', 'v_proj', 'o_proj'], False), 'gptossmx': (3, 6, ['q_proj', 'v_proj', 'o_proj'], False),
    'qwen35moe': (4, 8, [*SEVEN, *DELTA_RULE], False),
    'qwen35moeone': (3, 8, ['down_proj', 'gate_proj', 'v_proj', 'in_proj_z'], True),
    'qwen35moevl': (3, 6, ['q_proj', 'in_proj_qkv', 'up_proj'], False)}
MORE = {  # further settings of LoraConfig
    'layers': dict(layers_to_transform=[1]),
    'patterns': dict(rank_pattern={'q_proj': 2, r'layers\.[12]\.mlp\.down_proj': 6, 'layers.0.mlp.down_proj': 3},
                     alpha_pattern={'layers.1.self_attn.q_proj': 3, 'o_proj': 5.5},
                     exclude_modules=['layers.0.self_attn.v_proj', 'layers.2.self_attn.o_proj', 'up_proj']),
    'patternsvl': dict(rank_pattern={r'.*layers\.1\..*(q|k)_proj': 5}, alpha_pattern={'v_proj': 2}),
    'tokens': dict(trainable_token_indices=[77, 0, 31, 5]), 'tokenscls': dict(trainable_token_indices=[40, 7, 101]),
    'tokensboth': dict(trainable_token_indices=dict(embed_tokens=[3, 90, 17], lm_head=[90, 0]), layers_to_transform=[1]),
    'newtokens': dict(trainable_token_indices=[121, 31, 120]),
    'newtokensboth': dict(trainable_token_indices=dict(embed_tokens=[122, 120, 121], lm_head=[121, 120])),
    'tokensweighted': dict(trainable_token_indices=[0, 64]), 'ends': dict(rank_pattern=dict(embed_tokens=2)),
    'endsweighted': dict(alpha_pattern=dict(lm_head=3), rank_pattern=dict(lm_head=4))}


def added(config, key):  # whether the norm adds 1 to its gain
    kind = str(type(config)).lower()
    return 'gemma3' in kind or 'qwen3_5' in kind and not key.endswith('linear_attn.norm.weight')


def enlarge(model, more):  # rows of new tokens begin as the mean of all others, in the type of the saved model
    own = model.config.vocab_size
    model.resize_token_embeddings(own + more, mean_resizing=False)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        end.weight.data[own:] = end.weight.data[:own].double().mean(0).float().to(torch.bfloat16).float()


def draw_mxfp4(model):  # random blocks of all experts, whose values become the weights; returns the blocks by name
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    packed = {}
    for key, w in model.named_parameters():
        if not key.endswith('experts.gate_up_proj') and not key.endswith('experts.down_proj'): continue
        experts, inputs, outputs = w.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        least = 120 if 'down' in key else 123
        scales = torch.randint(least, least + 3, (experts, outputs, inputs // 32), dtype=torch.uint8)
        w.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        packed |= {key + '_blocks': blocks, key + '_scales': scales}
    return packed


def store_mxfp4(folder, packed):  # as OpenAI's own files are
    from safetensors.torch import load_file, save_file
    tensors = {key: w for key, w in load_file(f'{folder}/model.safetensors').items() if key + '_blocks' not in packed}
    save_file(tensors | packed, f'{folder}/model.safetensors', metadata=dict(format='pt'))
    with open(f'{folder}/config.json') as f: config = json.load(f)
    config['quantization_config'] = dict(quant_method='mxfp4', modules_to_not_convert=[
        'model.layers.*.self_attn', 'model.layers.*.mlp.router', 'model.embed_tokens', 'lm_head'])
    with open(f'{folder}/config.json', 'w') as f: f.write(json.dumps(config, indent=2) + '\n')


def join_experts(folder):  # all experts of a layer in two tensors, as transformers has them in memory
    from safetensors.torch import load_file, save_file
    tensors = load_file(f'{folder}/model.safetensors')
    of = lambda path, module: torch.stack([tensors.pop(f'{path}{i}.{module}.weight') for i in range(EXPERTS_OF_ONE)])
    for path in sorted({key.split('experts.')[0] + 'experts.' for key in tensors if '.experts.' in key}):
        tensors[path + 'gate_up_proj'] = torch.cat([of(path, 'gate_proj'), of(path, 'up_proj')], dim=1)
        tensors[path + 'down_proj'] = of(path, 'down_proj')
    save_file(tensors, f'{folder}/model.safetensors', metadata=dict(format='pt'))


def make(out, name, seed):
    torch.manual_seed(seed); random.seed(seed); os.makedirs(out, exist_ok=True)
    classes = name.endswith('cls'); config = (CONFIGS | WRAPPED)[name.removesuffix('cls')]()
    if classes: config.num_labels = 3
    kind = (AutoModelForSequenceClassification if classes else
            AutoModelForImageTextToText if name in WRAPPED else AutoModelForCausalLM)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation='eager')
    for key, w in model.named_parameters():  # biases and norms start trivial in from_config: give them an effect
        if key.endswith('bias'): torch.nn.init.normal_(w, std=0.1)
        elif key.endswith('sinks'): torch.nn.init.normal_(w)
        elif 'norm' in key: torch.nn.init.normal_(w, mean=0.0 if added(config, key) else 1.0, std=0.1)
        # with larger ones, rounding to bf16 changes the gradient of experts after delta rules by its own size
        elif 'embed' not in key and w.dim() > 1: torch.nn.init.normal_(w, std=(0.7 if name.startswith('qwen35moe') else 1.2) / math.sqrt(w.shape[1]))
    packed = draw_mxfp4(model) if name == 'gptossmx' else None
    model.to(torch.bfloat16).save_pretrained(f'{out}/model')
    model = kind.from_pretrained(f'{out}/model', dtype=torch.float32, attn_implementation='eager')
    if packed: store_mxfp4(f'{out}/model', packed)
    if name == 'qwen35moeone': join_experts(f'{out}/model')
    more = {'newtokens': 2, 'newtokensboth': 3}.get(name, 0)
    if more: enlarge(model, more)
    rank, alpha, targets, rslora = LORA[name]
    modules = SEVEN if targets == 'all' else targets
    if name in WRAPPED: modules = r'.*language_model.*\.(' + '|'.join(modules) + ')'
    if name == 'patternsvl': modules = r'.*language_model.layers.(0.self_attn|1.*)\.(' + '|'.join(SEVEN) + ')'
    peft = get_peft_model(model, LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=modules, use_rslora=rslora,
        lora_dropout=0.0, task_type='SEQ_CLS' if classes else 'CAUSAL_LM', **MORE.get(name, {})))
    for key, w in peft.named_parameters():
        if 'lora_B' in key: torch.nn.init.normal_(w, std=0.05)
        elif 'lora_embedding_A' in key: torch.nn.init.normal_(w, std=0.01)
        elif 'trainable_tokens_delta' in key: w.data += 0.1 * torch.randn_like(w)
    peft.save_pretrained(f'{out}/adapter_init')

    rows = []
    for _ in range(STEPS * BATCH):
        ids = [random.randrange(2, SIZES['vocab_size'] + more) for _ in range(random.randint(2, 21))]
        rows.append(dict(ids=ids, label=random.randrange(3)) if classes else dict(ids=ids + [0]))
        if name.endswith('weighted'): rows[-1]['weight'] = random.choice([-0.75, 0.0, 0.25, 1.0, 1.5, 3.0])
    if os.path.exists(f'{out}/model/generation_config.json'): os.remove(f'{out}/model/generation_config.json')
    expected = dict(arch=name, rank=rank, alpha=alpha, lr=LR, warmup_steps=WARMUP, steps=STEPS, batch=BATCH, clip=CLIP)
    if more: expected['vocabulary'] = SIZES['vocab_size'] + more
    train(out, peft, rows, expected, classes)


def train(out, peft, rows, expected, classes=False):
    trained = [w for w in peft.parameters() if w.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(adamw, num_warmup_steps=WARMUP, num_training_steps=STEPS)
    log = []
    for s in range(STEPS):
        batch = rows[s * BATCH:(s + 1) * BATCH]; total = 0.0
        count = len(batch) if classes else sum(len(r['ids']) - 1 for r in batch)
        for row in batch:  # one row at a time: no padding in the reference
            x = torch.tensor([row['ids']]); logits = peft(input_ids=x).logits
            if not classes: logits = logits[0, :-1]
            y = torch.tensor([row['label']]) if classes else x[0, 1:]
            loss = torch.nn.functional.cross_entropy(logits, y, reduction='sum') * row.get('weight', 1.0)
            (loss / count).backward(); total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(trained, CLIP)); rate = adamw.param_groups[0]['lr']
        adamw.step(); schedule.step(); adamw.zero_grad()
        log.append(dict(step=s + 1, loss=total / count, grad_norm=norm, lr=rate, tokens=count))
    peft.save_pretrained(f'{out}/adapter_final')
    for part in ('adapter_init', 'adapter_final'): os.remove(f'{out}/{part}/README.md')
    with open(f'{out}/expected.json', 'w') as f:
        lines = ',\n'.join(' ' + json.dumps(row) for row in rows); steps = ',\n'.join(' ' + json.dumps(x) for x in log)
        f.write(json.dumps(expected)[:-1] + ',\n"log": [\n' + steps + '],\n"rows": [\n' + lines + ']}\n')
    print(out, [round(x['loss'], 4) for x in log])


if __name__ == '__main__':
    for name in sys.argv[2:] or list(LORA):
        make(f'{sys.argv[1]}/{name}', name, 100 + list(LORA).index(name))
