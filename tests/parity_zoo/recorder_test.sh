#!/usr/bin/env bash
# Runs a Python test with the first interpreter that has torch; 77 where none has.
for python in ${HALFWIRE_TORCH_PYTHON:-python3 /usr/bin/python3}; do
  if "$python" -c 'import torch' 2>/dev/null; then
    exec "$python" "$@"
  fi
done
echo "skipped: no python3 here can import torch (Debian: apt-get install python3-torch)"
exit 77
