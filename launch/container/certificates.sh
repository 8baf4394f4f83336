#!/usr/bin/env bash
# Certificates for a trial on one machine: an authority, a server that is called HOST, and site-1 to site-N, of which each may be
# the client of its number. In OUT, one folder for each: OUT/server, OUT/site-1, ... What is there is left as it is.
#
#   launch/container/certificates.sh OUT HOST N
#
# Here one machine has every key. Between owners who do not share a machine each makes its own (docs/sites.md).
set -euo pipefail

usage="usage: $0 OUT HOST N"
out=${1:?$usage} host=${2:?$usage} count=${3:?$usage}
[ ! -f "$out/server/server.crt" ] || { echo "$0: $out has certificates"; exit 0; }

umask 077
mkdir -p "$out/server"
raafl certs init --folder "$out/server"
raafl certs server "$host" --folder "$out/server"
for ((number = 1; number <= count; number++)); do
    folder=$out/site-$number
    raafl certs request "site-$number" --folder "$folder"
    raafl certs sign "$folder/site-$number.csr" --folder "$out/server" --clients "$number"
    cp "$out/server/ca.crt" "$out/server/site-$number.crt" "$folder/"
done
