#!/usr/bin/env bash
# Two hosts on one machine: trains over a slow link between them, cuts the link, and resumes.
#
#   sudo PYTHON=.venv/bin/python scripts/two_hosts.sh
#
# The hosts are network namespaces, joined by a veth pair whose one end lets RATE through. Each has
# two workers and folders of its own, as two machines would. Checked are: equal weights on both
# hosts, one record, the data unpacked once on each host; that both sides end in time with a
# message when the link is cut in the middle, and that the job goes on when it is back, to the same
# weights as if nothing had happened.
#
# The launcher on the host that is cut off from the rendezvous asks its store once more and waits
# until TCP gives up. With Linux's 15 retries (net.ipv4.tcp_retries2) that takes a quarter of an
# hour, during which it holds nothing but its own process; the hosts here have 5.
#
#   PYTHON   interpreter with the requirements (default: python)
#   RATE     of the slow end, as tc takes it (default: 8mbit)
#   KEEP     a folder for logs and records (default: a temporary one, removed at the end)
#
# Exit code: 0 all is well, 1 something is not, 77 skipped, with a line that says why. Namespaces
# and processes are removed however it ends.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
rate=${RATE:-8mbit}
epochs=6
timeout=15    # seconds until a collective operation gives up
ends_in=30    # seconds after that until all workers have ended
gives_up=90   # seconds until TCP, and so the launcher that is cut off from the other's store, does
starts_in=300 # seconds for what has no reason to take so long
declare -A space=([a]=hsgd-$$-a [b]=hsgd-$$-b) address=([a]=10.77.0.1 [b]=10.77.0.2) pid=()
work=

say() { echo "two_hosts.sh: $*"; }
skip() { say "skipped: $*" >&2; exit 77; }

clean() {
    trap '' INT TERM HUP
    for name in "${space[@]}"; do
        [ -e "/var/run/netns/$name" ] || continue
        # Again and again: what was being started when the others were killed.
        while left=$(ip netns pids "$name") && [ -n "$left" ]; do
            kill -KILL $left 2>/dev/null || true
            sleep 0.1
        done
        ip netns delete "$name"
    done
    if [ -n "$work" ] && [ -z "${KEEP:-}" ]; then rm -rf "$work"; fi
}

fail() {
    say "FAILED: $*" >&2
    for log in "$work"/[ab]/*.log; do
        [ ! -e "$log" ] || { echo "--- the end of $log"; tail -n 25 "$log"; } >&2
    done
    exit 1
}

# --- may it run here, and the two hosts -----------------------------------------------------------

build_hosts() {
    [ "$(uname -s)" = Linux ] || skip "network namespaces need Linux"
    for tool in ip tc; do
        command -v "$tool" >/dev/null || skip "there is no command $tool (package iproute2)"
    done
    [ "$(id -u)" = 0 ] || skip "network namespaces need root: start it with sudo"
    "$python" -c 'import sys, importlib.util as u
sys.exit(not all(map(u.find_spec, ("torch", "torchvision", "yaml"))))' 2>/dev/null ||
        skip "$python lacks the requirements: set PYTHON to the interpreter that has them"
    trap clean EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    for name in "${space[@]}"; do
        ip netns add "$name" 2>/dev/null || skip "this system does not let root add a namespace"
    done
    ip link add lan netns "${space[a]}" type veth peer name lan netns "${space[b]}" 2>/dev/null ||
        skip "this system has no veth pairs"
    for host in a b; do
        ip -n "${space[$host]}" address add "${address[$host]}/24" dev lan
        ip -n "${space[$host]}" link set lo up
        ip netns exec "${space[$host]}" sh -c 'echo 5 >/proc/sys/net/ipv4/tcp_retries2'
        ip -n "${space[$host]}" link set lan up
    done
    tc -n "${space[b]}" qdisc add dev lan root tbf rate "$rate" burst 32kb latency 400ms ||
        skip "this system's tc cannot limit a link (tbf)"
}

# --- what is trained ------------------------------------------------------------------------------

write_inputs() {
    work=${KEEP:-$(mktemp -d)}
    mkdir -p "$work/a" "$work/b"
    work=$(cd "$work" && pwd)
    cat >"$work/config.yaml" <<YAML
name: two-hosts
algorithm: sync-sgd       # shares that do not depend on times: the weights can be compared
epochs: $epochs
batch_size: 16
model: {name: lenet}
data: {name: image_folder, root: $work/images.tar.gz}
optimizer: {lr: 0.05}
device: cpu
timeout: $timeout
YAML
    # The command line of trainer.py, which also notes each worker's weights at the end, and when
    # the data are unpacked.
    cat >"$work/worker.py" <<PYTHON
import os, sys, zlib
sys.path.insert(0, "$root")
import trainer
from data import archive

def note(kind, text):
    with open(f"{os.environ['HOST_FOLDER']}/{kind}", "a") as file:
        file.write(f"{text}\n")

class Trainer(trainer.Trainer):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        made.append(self)

made = []
trainer.Trainer = Trainer
new_folder = archive.new_folder
archive.new_folder = lambda target: note("unpacked", target) or new_folder(target)
trainer.main()
total = 0
for tensor in made[-1].module.state_dict().values():
    total = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), total)
note(f"weights-{os.environ['RUN']}", total)
PYTHON
    "$python" - "$work/images.tar.gz" <<'PYTHON'
import io, sys, tarfile
import numpy as np
from PIL import Image

draw = np.random.default_rng(0)
with tarfile.open(sys.argv[1], "w:gz") as tar:
    for split, count in (("train", 48), ("test", 8)):
        for label, name in enumerate(("dark", "light")):
            for number in range(count):
                content = io.BytesIO()
                pixels = draw.integers(100 * label, 100 * label + 156, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(content, "PNG")
                member = tarfile.TarInfo(f"{split}/{name}/{number}.png")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)
PYTHON
}

launch() { # RUN: starts both hosts' launchers
    for host in a b; do
        is_host=$([ "$host" = a ] && echo 1 || echo 0)
        ip netns exec "${space[$host]}" env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lan \
            HOST_FOLDER="$work/$host" RUN="$1" "$python" -m torch.distributed.run --nnodes=2 \
            --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint="${address[a]}:29500" \
            --rdzv-id="$1" --rdzv-conf="is_host=$is_host,read_timeout=20" --monitor-interval=1 \
            --local-addr="${address[$host]}" "$work/worker.py" --config "$work/config.yaml" \
            --output "$work/$host/$1" data.cache="$work/$host/cache" >>"$work/$host/$1.log" 2>&1 &
        pid[$host]=$!
    done
}

ends() { # HOST SECONDS: waits for its launcher, and leaves its exit code in `code`
    local until=$((SECONDS + $2))
    while kill -0 "${pid[$1]}" 2>/dev/null; do
        [ $SECONDS -lt $until ] || fail "host $1 still runs after $2 s"
        sleep 0.2
    done
    code=0
    wait "${pid[$1]}" || code=$?
}

workers_left() { # the processes on both hosts but for their launchers
    for host in a b; do
        ip netns pids "${space[$host]}" | grep -vx "${pid[$host]}" || true
    done
}

finishes() { # RUN: both hosts end well, with one record, and all four workers' weights are equal
    for host in a b; do
        ends $host $starts_in
        [ $code = 0 ] || fail "host $host ended with $code"
    done
    local records=("$work"/[ab]/"$1"/*/*/seed-*/epochs.jsonl)
    [ "${#records[@]}" = 1 ] && [[ ${records[0]} = "$work/a/"* ]] ||
        fail "not one record, on the first host: ${records[*]}"
    record=$(dirname "${records[0]}")
    # Refuses records in which an epoch is missing or twice.
    local recorded
    recorded=$(cd "$root" && "$python" -c \
        'import sys, reader; print(len(reader.read_run(sys.argv[1]).epochs))' "$record")
    [ "$recorded" = $epochs ] || fail "$recorded of $epochs epochs are recorded"
    weights=$(cat "$work"/[ab]/weights-"$1")
    [ "$(wc -l <<<"$weights")" = 4 ] || fail "not four workers told their weights"
    [ "$(sort -u <<<"$weights" | wc -l)" = 1 ] || fail "weights differ:" $weights
}

# --- the checks -----------------------------------------------------------------------------------

build_hosts
write_inputs
say "training over a link of $rate"
launch whole
finishes whole
whole=${weights%%$'\n'*}
for host in a b; do
    [ "$(wc -l <"$work/$host/unpacked")" = 1 ] || fail "host $host unpacked the data more than once"
done
say "ok: equal weights on both hosts, one record, data unpacked once on each"

say "the same, with the link cut in the middle"
launch cut
until [ "$(cat "$work"/a/cut/*/*/seed-*/epochs.jsonl 2>/dev/null | wc -l)" -ge 2 ]; do
    kill -0 "${pid[a]}" 2>/dev/null && kill -0 "${pid[b]}" 2>/dev/null || fail "it ended too soon"
    sleep 0.2
done
sleep 0.5
ip -n "${space[a]}" link set lan down
begin=$SECONDS
while [ -n "$(workers_left)" ]; do
    [ $SECONDS -lt $((begin + timeout + ends_in)) ] || fail "workers still run"
    sleep 0.2
done
say "all workers ended after $((SECONDS - begin)) s"
for host in a b; do
    ends $host $gives_up
    [ $code != 0 ] || fail "host $host ended as if nothing had happened"
    told=$(grep -m 1 -oE 'rank [0-9]+: an exchange with the other workers failed.*' \
        "$work/$host/cut.log") ||
        fail "host $host does not say what happened"
    say "host $host ended after $((SECONDS - begin)) s: $told"
done
for host in a b; do
    [ -z "$(ip netns pids "${space[$host]}")" ] || fail "host $host has left processes"
done

ip -n "${space[a]}" link set lan up
rm -f "$work"/[ab]/weights-cut
launch cut
finishes cut
[ "${weights%%$'\n'*}" = "$whole" ] || fail "the resumed run's weights are not the undisturbed one's"
grep -q '"continued"' "$record/provenance.json" || fail "the run was not continued but started again"
say "ok: resumed when the link was back, to the same weights"
