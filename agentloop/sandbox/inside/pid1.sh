# The first process of a sandbox that is made of an image: Python when the image has it (pid1.py), else this.
#
# A POSIX shell reads orders, a line each, from a named pipe of the host; every command gets named pipes of its own
# there, under names that cannot be guessed, and they are removed once they are open. So there are no frames, and
# the host reads what a command prints at its source.
#
# What pid1.py does and a shell cannot: keep its pipes, and what tells an exit code, from other commands of the same
# user (until all of them are ended: then orders come by a new pipe); know the exit code of a command that killed every process it could (137 then); lead to a proxy; make a terminal.
#
# Arguments: what Python would run, then what pid1.py takes: the socket folder, the folder to start in, a lifetime
# (which the host keeps here).
needed='import sys, fcntl, select, struct, termios, _socket; sys.exit(sys.version_info < (3, 6))'
if command -v python3 >/dev/null 2>&1 && python3 -I -S -c "$needed" 2>/dev/null; then
    exec python3 -I -S -c "$@"
fi
sockets=$2 folder=$3 files=/run/agentloop/files mark=AGENTLOOP_COMMAND ours= n=0
PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
export PATH LANG=C.UTF-8 TZ=UTC PYTHONHASHSEED=0 SOURCE_DATE_EPOCH=0

# A shell that reads a script would end at SIGINT. What it starts in the background ignores that, where `env` cannot
# undo it.
trap '' INT
env --default-signal=INT,QUIT true 2>/dev/null && heed='env --default-signal=INT,QUIT' || heed=

exec 3<"$sockets/orders" 5>"$sockets/hello"
if [ -d $files ] && ! said=$({ cp -RPp $files/. /work && chmod u+rwx /work; } 2>&1); then
    echo "cannot fill /work: $said" | head -n 1 >&5
    exit 1
fi
cd "$folder" 2>/dev/null || { echo "cannot start in $folder, which is not there" >&5; exit 1; }
echo >&5
exec 2>/dev/null 5>&-

# NAME LEASE IDENT STDIN CONTROL TEXT: the pid, then the exit code, go to 6, which is NAME.end
run() {
    (
        exec 3<&- >"$sockets/$1.out" 2>"$sockets/$1.err" </dev/null
        [ "$4" = 1 ] && exec <"$sockets/$1.in"
        [ "$5" = 1 ] && exec 3<"$sockets/$1.orders" 4>"$sockets/$1.records"
        if [ "$2" != - ]; then
            [ -d "/tmp/$2" ] || mkdir "/tmp/$2" 2>/dev/null
            export HOME="/tmp/$2" TMPDIR="/tmp/$2"
        fi
        export "$mark=$2.$3."
        # When memory runs out the kernel ends commands, and only then PID 1 and with it the sandbox.
        { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
        # A shell gives a command in the background /dev/null for its input, unless it is told otherwise.
        exec 7<&0
        # The text first: what cannot fork in the background ends there, in some shells with the exit code 0.
        set -- "$1" "$2" "$3" "$4" "$5" "$(printf %b "$6")"
        $heed setsid sh -c "$6" <&7 7<&- 6>&- &
        [ "$5" = 1 ] && exec 3<&- 4>&-
        exec </dev/null >/dev/null 2>&1 7<&-
        echo $! >&6
        wait $!
        echo $? >&6
    ) &
    ours="$ours $!"
}

marked() { # list: the processes whose mark begins with $1
    # head puts names between the files, tr makes lines: there are shells' greps that see no further than a NUL.
    words=$(head -v -c 65536 /proc/[0-9]*/environ | tr '\0' '\n' |
        grep -o -e '^==> /proc/[0-9]*' -e "^$mark=[A-Za-z0-9._-]*") || exit
    list=
    for word in $words; do
        case $word in
        /proc/*) pid=${word#/proc/} ;;
        "$mark=$1"*) list="$list $pid" ;;
        esac
    done
}

strays() { # list: the orphans that have no mark, and are none of ours
    marked ''
    known=" $ours $self$list "
    alive=$(grep -ls '^State:[[:space:]]*[^ZX]' /proc/[0-9]*/status)
    orphans=$(grep -ls '^PPid:[[:space:]]*1$' $alive)
    list=
    for file in $orphans; do
        file=${file#/proc/} pid=${file%%/*}
        case $known in *" $pid "*) ;; *) list="$list $pid" ;; esac
    done
}

# Kill what is marked $1, and strays. A pass catches what was forked during the one before; should more appear
# than can be killed one by one, everything in the sandbox goes: a bomb spares nothing.
sweep() {
    (
        read -r self rest </proc/self/stat
        for pass in 1 2 3 4 5 6 7 8 9 10; do
            strays
            found=$list
            marked "$1"
            found=$found$list
            [ "$found" ] || exit 0
            kill -9 $found
        done
        exit 1
    ) 3<&- || return
    (:) # a shell waits for every child that has ended while it waits for one
    alive=
    for pid in $ours; do
        [ -d "/proc/$pid" ] && alive="$alive $pid"
    done
    ours=$alive
    [ -d "/proc/$spare" ] || reserve
}

foreground() { # kill what is marked $2 and began at $3 or later, in clock ticks since boot; but not $1
    (
        marked "$2"
        for pid in $list; do
            read -r line <"/proc/$pid/stat" || continue
            set -- "$1" "$2" "$3" ${line##*)}
            [ "$pid" = "$1" ] || [ "${23}" -lt "$3" ] || kill -9 "$pid"
        done
        exit 0
    ) 3<&-
}

remove() { # the scratch of the lease $1
    n=$((n + 1))
    mv "/tmp/$1" "/tmp/.discarded-$n" || return 0
    (chmod -R u+rwx "/tmp/.discarded-$n"; rm -rf "/tmp/.discarded-$n") >/dev/null 3<&- &
    ours="$ours $!"
}

# A process that does nothing. Without one to wait for, a sandbox full of what has been killed could not be cleared.
reserve() {
    (
        exec 3<&-
        read -r self rest </proc/self/stat
        while :; do kill -STOP "$self"; done
    ) &
    spare=$! ours="$ours $!"
}

end_all() {
    kill -9 -1
    wait
    ours= tries=0
    while set -- /proc/[0-9]*; [ $# -gt 1 ] && [ $tries -lt 1000 ]; do
        (:)
        tries=$((tries + 1))
    done
    reserve
}

# A shell that cannot fork gives up. `command eval` keeps PID 1 from that, and with it the sandbox; but its child as well.
attempt() {
    did=
    command eval "$1 && did=1" # busybox gives 0 for what ended in the middle
    [ "$did" ] && return
    read -r self rest </proc/self/stat
    [ "$self" = 1 ] && return 1
    echo 0 126 >&6
    exit 126
}

reserve
while read -r verb a b c d e text <&3; do
    case $verb in
    run)
        # Opened here, so that it ends when whoever is to write there was killed; both ways, so as not to wait.
        { attempt 'run "$a" "$b" "$c" "$d" "$e" "$text"' || echo 0 126 >&6; } 6<>"$sockets/$a.end"
        ;;
    kill) kill "-$b" "-$a" || kill "-$b" "$a" ;; # it may not lead its group yet
    foreground) attempt 'foreground "$a" "$b" "$c"' || end_all ;;
    sweep) attempt 'sweep "$a"' || end_all ;;
    discard)
        attempt 'sweep "$a."' || end_all
        attempt 'remove "$a"' || end_all
        ;;
    end) # what was killed may have put orders of its own into the pipe they came by
        end_all
        exec 3<"$sockets/$a"
        ;;
    esac
done
