#!/bin/sh
# Lets an engine that starts have processor time before those that serve: in the lab all hosts share a few cores, and a
# start beside busy engines would take minutes. On real hosts each engine has its own cores. Runs in every host; knows
# nothing of who started the engine, so each way of restarting it is served alike.
seen=
while sleep 1; do
    pid=$(systemctl show --value --property MainPID vllm-engine@chat.service)
    [ "${pid:-0}" != 0 ] && [ "$pid" != "$seen" ] || continue
    if curl --silent --fail --max-time 2 --unix-socket /run/vllm/chat/engine.sock http://engine/health; then
        echo 15 > "/proc/$pid/autogroup" && seen=$pid
    fi
done
