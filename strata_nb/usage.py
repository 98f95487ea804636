"""The usage texts of all commands: docopt reads each, and it is the command's specification."""

MAIN_USAGE = """\
Run Mixture-of-Experts language models in pure Python.

Usage:
  strata_nb COMMAND [ARGUMENTS...]
  strata_nb COMMAND --help
  strata_nb --version

Commands:
  generate    write text that continues a prompt
  chat        talk with a model, turn by turn
  tokenize    show how a text is cut into tokens
  info        show what is in a model file and what would fit where
  perplexity  measure how well a model predicts a text, or compare two runs
  devices     show on what models can run here
  inspect     check what a run did to a device's memory, and look at it
  bench       measure how fast prompts are read and tokens written (`bench policy`: compare ways to
              keep experts on a device, with recorded routes)

`strata_nb generate` alone writes a story, with a small model that comes with strata_nb.
"""

_MODEL = """\
  -m FILE, --model FILE        the model: a GGUF file (of a split one, any shard){default}"""
_ANY_MODEL = _MODEL.format(
    default="""; default: the story
                               model that comes with strata_nb"""
)
_MODEL_THAT_ANSWERS = _MODEL.format(default="")

_SWAPS = """\
  --adapt-every N              swap: windows between two rounds; 0: never (default 4)
  --adapt-swaps N              swap: exchanges of a round, of all layers (default 96)
  --adapt-decay X              swap: what a round leaves of each count of uses (default 0.7)"""

_DEVICE = """\
  --device TEXT                auto (default): the first NVIDIA card that can be used, or else host;
                               host: this machine, for which the first start compiles kernels, in a
                               process for each core;
                               cuda, cuda:1: the first or second NVIDIA card, with slots for experts
                               (needs pip install 'strata-nb[cuda]');
                               host:1x512MiB: a small device made of the host's memory, with slots
                               too (in general host:NxSIZE[@CHUNK]);
                               reference: the float32 judge, which has none of the flags on experts
  -c N, --ctx-size N           cells of the K/V cache (default: {context})
  -t N, --threads N            threads that load, and compute where the host does (default: physical
                               cores within affinity and quota), and the most of the CPU pool
  --prefill N                  rows of a prompt batch, or auto (default auto: 512, of a card 2,048
                               or, from 32 GiB on, 4,096, the most that it reads at once)
  --ctk TYPE, --cache-type-k TYPE  how keys are stored: f32, f16 or int8 (default f16, of the
                               reference f32)
  --ctv TYPE, --cache-type-v TYPE  how values are stored (likewise)
  --expert-cache SIZE          expert slots, on a device that has them: auto (the default:
                               all that there is room for), a number, N% of all, NMiB or NGiB
  --adapt TEXT                 how experts in slots follow the text: insert (the default: a miss
                               comes that is more likely to be used than who leaves), swap (at
                               times the most used exchange with the least used), off
{swaps}
  --pcie-frac F                on a card: the share of the missed experts that it reads over its
                               link, the CPU computes the others; auto (the default): as measured
  --no-cpu-pool                on a card: let the CPU compute none of them
  --no-pin                     on a card: register no host memory, where that is refused or not
                               wanted; the CPU computes all experts without a slot, and prompts are
                               read more slowly
  --vram-reserve-mib N         MiB of the device that stay free for others (default 0, of a card
                               700)
  --vram-limit SIZE            let a card, or a small device, count as one of SIZE in all (12GiB),
                               with what is in use on it; it stays as fast as it is
  --kv-grow                    begin with a small K/V and grow it as the text needs, experts use the
                               memory meanwhile (the default, but not on the whole machine: host)
  --no-kv-grow                 take memory for the whole context at the start
  --kv-grow-init N             cells to begin with (default: a quarter of the context, 512 to 16384)
  --kv-grow-step N             cells to grow by (default: an eighth of the context, 64 to 8192)
  --expert-profile FILE        fill the slots at the start in the order of this file; without slots
                               it is only what --expert-profile-save goes on with (default: of the
                               story model its own; none: of no file)
  --expert-profile-save FILE   write which experts were used most, for the next start
  --routing-trace FILE         write the experts of every token that is read: int16 .npy (tokens,
                               layers, top-k)
  --trace FILE                 write every driver call and what the ledger did to FILE, on a device
                               with memory of its own (host:1x512MiB, cuda): for `strata_nb inspect`
  --no-overlap                 on a card: begin no kernel before the one in front of it has ended
                               (slower, the same bits)
  --no-prefill-borrow          on a card: keep buffers for experts that prompts miss, in place of
                               borrowing memory while they are read, of slots too
  --deterministic              the same bits whatever budget, batch and threads are: on a card the
                               CPU computes no experts, and prompts are read more slowly (on the
                               host they always are the same, of the reference never)"""
_CONTROL = """\
  --vram-elastic               let --control change what stays free while the model is open
  --control PATH               answer lines on a Unix socket at PATH: VRAM [MIB] leaves so much of
                               the device free for others (alone: as at the start), STATUS
                               describes the engine"""
_DEVICE_OF_A_TEXT = _DEVICE.format(swaps=_SWAPS, context="the model's, at most 8192")
_DEVICE_OF_A_BENCH = _DEVICE.format(swaps=_SWAPS, context="as many as the longest test needs")
_DEVICE_OF_CHUNKS = _DEVICE.format(swaps=_SWAPS, context="512, which is a chunk of the text")

_SAMPLING = """\
  --temp X                     temperature; 0 takes the most likely token (default 0.8)
  --top-k N                    keep the N most likely tokens; 0 keeps all (default 40)
  --top-p X                    keep the smallest set that reaches probability X (default 0.95)
  --min-p X                    drop what is less likely than X times the best (default 0.05)
  --repeat-penalty X           divide the logits of recent tokens by X (default 1: off)
  --presence-penalty X         subtract X for a recent token (default 0: off)
  --frequency-penalty X        subtract X for each recent occurrence (default 0: off)
  --repeat-last-n N            how many tokens are recent; -1: all (default 64)
  --seed N                     of the random numbers (default: drawn, and shown at the end)"""

_TEMPLATE = """\
  --chat-template TEXT         auto (the file's own), chatml, or a template's text
  --chat-template-file FILE    a file that holds a template"""

_OUTPUT = """\
  --stats-json FILE            write speeds and counts to FILE as JSON
  --verbose                    say more about what is done, on stderr
  -h, --help                   show this text"""

GENERATE_USAGE = f"""\
Write text that continues a prompt. The text goes to stdout, everything else to stderr.
With neither a prompt nor a model, write a story.

Usage:
  strata_nb generate [options] [--stop TEXT]... [--] [PROMPT]

The prompt is continued as it stands. With --system, --chat-template or --chat-template-file it is a
user's message instead, put into the chat template, and the answer is written.

Options:
{_ANY_MODEL}
  -p TEXT, --prompt TEXT       the prompt (or as the first word that is no flag)
  -f FILE, --file FILE         read the prompt from FILE, - is stdin; one newline at the end is cut
  --echo                       write the prompt before what continues it (default: to a terminal; of
                               a prompt that was not given, always)
  --no-echo                    write only what continues the prompt
  --parse-special              read control tokens such as <|im_end|> in the prompt as tokens
  --system TEXT                answer the prompt as a chat with this system message
{_TEMPLATE}
  -n N, --max-tokens N         tokens to write at most; -1: until the model ends (default 256, of
                               the story model -1)
  --stop TEXT                  end before TEXT appears; may be given several times
  --ignore-eos                 never end at the model's own end; the repeat guard is off too
  --watch                      show the device's memory below the text, on a terminal: a cell for
                               each chunk, brighter where more is going on
{_SAMPLING}
{_DEVICE_OF_A_TEXT}
{_CONTROL}
{_OUTPUT}
"""

CHAT_USAGE = f"""\
Talk with a model, turn by turn: a line is a message, /reset forgets, /exit or end of input ends.

Usage:
  strata_nb chat [options] [--stop TEXT]...

Options:
{_MODEL_THAT_ANSWERS}
  --system TEXT                the system message
{_TEMPLATE}
  -n N, --max-tokens N         tokens of an answer at most; -1: until the model ends (default -1)
  --stop TEXT                  end an answer before TEXT appears; may be given several times
  --ignore-eos                 never end at the model's own end; the repeat guard is off too
{_SAMPLING}
{_DEVICE_OF_A_TEXT}
{_CONTROL}
{_OUTPUT}
"""

TOKENIZE_USAGE = f"""\
Show how a text is cut into tokens: a line per token, its id and its bytes.

Usage:
  strata_nb tokenize [options] [--] [TEXT]

Options:
{_ANY_MODEL}
  -p TEXT, --prompt TEXT       the text (or as the first word that is no flag)
  -f FILE, --file FILE         read the text from FILE as it stands, - is stdin
  --ids                        print the ids alone, on one line
  --add-special                add the tokens that begin and end a text, as the file asks for
  --parse-special              read control tokens such as <|im_end|> in the text as tokens
  -h, --help                   show this text
"""

INFO_USAGE = f"""\
Show what is in a model file, and what would fit where, as a sum line by line.

Usage:
  strata_nb info [options] [--] [FILE]

Options:
{_ANY_MODEL}
  -c N, --ctx-size N           cells of the K/V in the sum (default: the model's, at most 8192)
  --ctk TYPE, --cache-type-k TYPE  how keys are stored in the sum: f32, f16 or int8 (default f16)
  --ctv TYPE, --cache-type-v TYPE  how values are stored in the sum (default f16)
  --vram SIZE                  a card of SIZE, such as 12GiB, in place of 8, 12, 16 and 24 GiB
  --keys                       print every metadata key
  --tensors                    print every tensor
  -h, --help                   show this text
"""

PERPLEXITY_USAGE = f"""\
Measure how well a model predicts a text; with --kl-base, compare with the logits of another run.

Usage:
  strata_nb perplexity [options]

The text is read in chunks of --ctx-size tokens; the second half of each chunk is scored.

Options:
{_ANY_MODEL}
  -f FILE, --file FILE         the text, - is stdin
  --save-logits FILE           write the logits of this run to FILE, for --kl-base of another run
  --kl-base FILE               compare with the run that wrote FILE: KL divergence, best tokens
  --chunks N                   read at most N chunks (default: all)
{_DEVICE_OF_CHUNKS}
{_OUTPUT}
"""

DEVICES_USAGE = """\
Show on what models can run here.

Usage:
  strata_nb devices [options]

Options:
  --device TEXT                show this device only; auto: the one that commands run on unless
                               told otherwise, and why
  -h, --help                   show this text
"""

INSPECT_USAGE = """\
Check what a run did to a device's memory, and make a page to look at it.

Usage:
  strata_nb inspect [options] [--] [FILE]

FILE is what generate --trace FILE wrote. The status is 1 where a rule of memory was broken.

Options:
  --html FILE                  write one HTML page: addresses and chunks over time, with every call
  -h, --help                   show this text
"""

BENCH_USAGE = f"""\
Measure how fast prompts are read and tokens written, and how much of the device's memory bandwidth
the latter uses.

Usage:
  strata_nb bench [options]

Tests have llama-bench's names: pp512 reads a prompt of 512 tokens, tg128 writes 128, and
"tg128 @ d1024" does so behind 1,024 others. Lists are numbers such as 0,512; a prompt or an answer
of 0 tokens leaves its test out. A table goes to stdout, or everything as JSON.

Options:
{_ANY_MODEL}
  -p LIST, --n-prompt LIST     tokens of prompts (default 512)
  -n LIST, --n-gen LIST        tokens to write (default 128)
  -d LIST, --n-depth LIST      tokens that are there before (default 0)
  --cold N                     also the first N tokens of a text that begins with empty slots
                               ("tg64 cold"), on a device that has slots
  --steady N                   also what -n says behind the first N tokens of such a text ("tg128
                               steady"; 256, say)
  -r N, --repetitions N        runs of each test that count, after one that does not (default 5)
  -o FORMAT, --output FORMAT   md (default) or json
  --profile                    on a card: where the time of a token behind each test goes, kernel by
                               kernel
  --force-routes FILE          token t of a text uses the experts of line t of FILE (int16 .npy
                               (tokens, layers, top-k), as generate --routing-trace writes it), not
                               the router's choice; their shares stay the router's
  --seed N                     of the token ids of prompts (default 0)
{_DEVICE_OF_A_BENCH}
  --verbose                    say more about what is done, on stderr
  -h, --help                   show this text
"""

BENCH_POLICY_USAGE = f"""\
Replay recorded routes against policies that decide which experts have slots, and print how often
each expert was found there, and what had to be moved.

Usage:
  strata_nb bench policy [options] [--] TRACE...
  strata_nb bench policy --help

A TRACE is written by generate --routing-trace: int16 .npy (tokens, layers, top-k). Policies:
  static      the slots hold what the profile ranks first
  lru         every miss comes, who was unused for the longest time leaves
  lfu         every miss comes, who was used least often leaves
  swap        at times the most used exchange with the least used, within each layer
  insert      a miss comes that is more likely to be used than who leaves (--adapt insert)
  optimum     knows the future: nothing has more hits with fewer bytes moved

Options:
  --budgets LIST               slots, in percent of all experts (default 10,25,50)
  --experts N                  experts of a layer (default: as many as the trace names)
  --learn FILE                 learn the profile from this trace (default: from the first half of
                               TRACE, and only the other half is replayed)
  --expert-profile FILE        the profile, in place of one that is learned
  --slot-bytes SIZE            of an expert: what is moved is then said in bytes
{_SWAPS}
  -h, --help                   show this text
"""

USAGE = {
    "generate": GENERATE_USAGE,
    "chat": CHAT_USAGE,
    "tokenize": TOKENIZE_USAGE,
    "info": INFO_USAGE,
    "perplexity": PERPLEXITY_USAGE,
    "devices": DEVICES_USAGE,
    "inspect": INSPECT_USAGE,
    "bench": BENCH_USAGE,
    "bench policy": BENCH_POLICY_USAGE,
}
