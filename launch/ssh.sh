#!/usr/bin/env bash
# `raafl serve` here, and `raafl join` over SSH on each host of a file: one line for each client, `[user@]host [folder]`.
# The client of the first line is client 1, and so on; two lines may name one host. FOLDER is where it is started.
#
#   ADDRESS=10.0.0.1:29500 launch/ssh.sh configs/quickstart.yaml hosts.txt [options of raafl serve]
#
# Each host makes a key of its own in .raafl-client-N, which stays there; its request is signed here, by an authority of this
# launch alone. What is said is encrypted. A client that fails is started again, RESTARTS times. What the clients say goes to LOGS.
#
#   ADDRESS      HOST:PORT of this machine, as the clients reach it
#   CERTS        folder of `raafl certs`, with an authority and a server. Unset: one for this launch, removed at its end
#   JOIN         what starts raafl on the hosts ("raafl"); for example .venv/bin/raafl
#   JOIN_OPTIONS further options of raafl join, as on a command line
#   SSH_OPTIONS  of ssh, for example "-i key -p 2222"
#   RESTARTS, PAUSE_S   how often a client is started again (3), and after how many seconds (5)
#   LOGS         folder of the clients' output (ssh-logs)
set -euo pipefail

usage="usage: ADDRESS=HOST:PORT $0 CONFIG HOSTS [options of raafl serve]"
config=${1:?$usage} hosts=${2:?$usage}
shift 2
: "${ADDRESS:?HOST:PORT of this machine, as the clients reach it}"
CERTS=${CERTS:-} JOIN=${JOIN:-raafl} RESTARTS=${RESTARTS:-3} PAUSE_S=${PAUSE_S:-5}
LOGS=${LOGS:-ssh-logs}

mapfile -t lines < <(grep -vE '^[[:space:]]*(#|$)' "$hosts")
[ "${#lines[@]}" -gt 0 ] || { echo "$0: $hosts names no host" >&2; exit 2; }
SCRATCH=$(mktemp -d)
if [ -z "$CERTS" ]; then
    CERTS=$SCRATCH/certs host=${ADDRESS%:*}
    raafl certs init --folder "$CERTS" >/dev/null
    raafl certs server --folder "$CERTS" "${host//[\[\]]/}" >/dev/null
fi
mkdir -p "$LOGS"

# A client: ssh again and again, until it ends well or the server is gone. $1 its number, $2 its host, $3 its folder.
client() {
    local command code attempt folder
    local certs=.raafl-client-$1
    trap '' INT HUP # Ctrl-C is for the server, which lets the clients go
    folder=${3:-.} # ssh starts at home, and a quoted ~ is a folder of that name
    [[ $folder != \~ && $folder != \~/ ]] || folder=.
    folder=${folder#\~/}
    # shellcheck disable=SC2086  # SSH_OPTIONS are several words; the command is put together here, to be run there
    there() { ssh -o BatchMode=yes -o ServerAliveInterval=30 ${SSH_OPTIONS:-} "$@"; }
    command="cd $(printf %q "$folder") && tar -xf - -C $certs"
    command+=" && exec $JOIN join --address $(printf %q "$ADDRESS") --client $1 --certs $certs ${JOIN_OPTIONS:-}"
    for ((attempt = 0; attempt <= RESTARTS; attempt++)); do
        code=0
        certify "$1" "$2" && tar -cf - -C "$CERTS" ca.crt "client-$1.crt" | there "$2" "$command" || code=$?
        [ "$code" -ne 0 ] || return 0
        echo "launch: client $1 on $2 has ended with exit code $code" >&2
        kill -0 "$server" 2>/dev/null || return "$code"
        sleep "$PAUSE_S"
    done
}

# Have the host make a key and a request, and sign that. $1 the client's number, $2 its host; the rest is the caller's.
certify() {
    local request
    request="cd $(printf %q "$folder") && $JOIN certs request client-$1 --folder $certs >&2 && cat $certs/client-$1.csr"
    there "$2" "$request" </dev/null >"$SCRATCH/client-$1.csr" &&
        flock "$SCRATCH" raafl certs sign "$SCRATCH/client-$1.csr" --folder "$CERTS" --clients "$1"
}

# Whatever happens, no ssh stays; a client whose server has gone ends by itself.
started=()
# shellcheck disable=SC2317,SC2329  # called by the trap
end() {
    local pid
    for pid in "${started[@]}"; do
        pkill -P "$pid" 2>/dev/null || true
        kill "$pid" 2>/dev/null || true
    done
    rm -rf "$SCRATCH"
}
trap end EXIT

# In a session of its own: Ctrl-C reaches it once, by way of this script, and asks it to end; the second has it end at once.
# SIGINT, which a shell's background process ignores unless told otherwise, ends the clients, too; after SIGTERM they would wait.
setsid env --default-signal=INT raafl serve --config "$config" --address "0.0.0.0:${ADDRESS##*:}" --certs "$CERTS" \
    --clients "${#lines[@]}" "$@" &
server=$!
trap 'kill -INT "$server" 2>/dev/null' INT TERM HUP

for number in "${!lines[@]}"; do
    read -r host folder <<<"${lines[number]}"
    client "$((number + 1))" "$host" "$folder" >"$LOGS/client-$((number + 1)).log" 2>&1 &
    started+=("$!")
done

code=0
wait "$server" || code=$?
while kill -0 "$server" 2>/dev/null; do # a signal has ended the wait; the server winds up
    code=0
    wait "$server" || code=$?
done
# The clients have been told: they leave by themselves, or are left.
for ((tick = 0; tick < 100; tick++)); do
    left=0
    for pid in "${started[@]}"; do ! kill -0 "$pid" 2>/dev/null || left=1; done
    [ "$left" -ne 0 ] || break
    sleep 0.1
done
exit "$code"
