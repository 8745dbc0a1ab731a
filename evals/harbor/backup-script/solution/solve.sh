#!/bin/sh
cat > /app/backup.sh <<'SH'
#!/bin/sh
set -eu
source=$1 destination=$2
if [ ! -d "$source" ]; then
    echo "backup.sh: $source is no folder" >&2
    exit 2
fi
mkdir -p "$destination"
highest=0
for file in "$destination"/backup-*.tar.gz; do
    n=${file##*/backup-}
    n=${n%.tar.gz}
    case $n in '' | *[!0-9]*) continue ;; esac
    [ "$n" -gt "$highest" ] && highest=$n
done
new=$((highest + 1))
tar -czf "$destination/backup-$new.tar.gz" -C "$source" .
for file in "$destination"/backup-*.tar.gz; do
    n=${file##*/backup-}
    n=${n%.tar.gz}
    case $n in '' | *[!0-9]*) continue ;; esac
    [ "$n" -le $((new - 3)) ] && rm -f "$file"
done
echo "$destination/backup-$new.tar.gz"
SH
chmod +x /app/backup.sh
