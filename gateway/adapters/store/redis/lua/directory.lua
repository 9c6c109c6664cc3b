-- directory, version 2: the entitlements that change at run time, shared by all gateways.
--
-- KEYS[1]  entries   hash: name -> VERSION blank JSON
-- KEYS[2]  changed   sorted set: names of entries, by the revision of their last write
-- KEYS[3]  removed   sorted set: "ID:NAME" of deleted entries, by revision; the newest are kept
-- KEYS[4]  files     hash: "ID:NAME" -> modification time of the file that dropped it
-- KEYS[5]  marks     sorted set: names of the last writes, by revision
-- KEYS[6]  revision  number of the last write
-- ARGV[1]  put, delete, changes or removals
-- ARGV[2]  put, delete: the write's name; changes: the revision last read
-- ARGV[3]  put, delete: the write's revision is above this; changes: name of the last write that
--          the caller knows, or empty
-- ARGV[4]  how many removals and names of writes are kept
-- ARGV[5]  put, delete: name of the last write that the caller knows, or empty
-- ARGV[6]  and so on, per entry: put: name, id, version it is based on (0: new), JSON;
--          delete: name, id, version, file's Unix time
--
-- put and delete return {revision, {names that were not written}}; changes returns {1, revision,
-- name of the last write, {VERSION blank JSON ...}, {"ID:NAME", revision, file's Unix time ...},
-- revision since which all removals are kept}, or {0} if the named write is unknown; removals
-- returns the same with all removals and no entries.

local ENTRIES, CHANGED, REMOVED, FILES, MARKS, REVISION = unpack(KEYS)
local call = redis.call

local function version_of(name)
  local kept = call('HGET', ENTRIES, name)
  return kept and string.match(kept, '^%d+') or '0'
end

local function last_revision() return tonumber(call('GET', REVISION) or '0') end

-- Whether a write is known; the empty name, before the first write, always is.
local function known(mark) return mark == '' or call('ZSCORE', MARKS, mark) end

local function whole(number) return string.format('%.0f', number) end

-- Keeps the newest `most` members of a sorted set; returns the dropped ones.
local function trim(key, most)
  local over = call('ZCARD', key) - most
  if over <= 0 then return {} end
  local gone = call('ZRANGE', key, 0, over - 1)
  call('ZREMRANGEBYRANK', key, 0, over - 1)
  return gone
end

local function next_revision()
  local revision = whole(math.max(last_revision(), tonumber(ARGV[3])) + 1)
  call('SET', REVISION, revision)
  call('ZADD', MARKS, revision, ARGV[2])
  trim(MARKS, tonumber(ARGV[4]))
  return revision
end

if ARGV[1] == 'put' then
  local revision, conflicts = nil, {}
  local continues = known(ARGV[5])
  for i = 6, #ARGV, 4 do
    local name, tomb = ARGV[i], ARGV[i + 1] .. ':' .. ARGV[i]
    local based = version_of(name) == ARGV[i + 2] and not call('ZSCORE', REMOVED, tomb)
    if not (continues and based) then
      conflicts[#conflicts + 1] = name
    else
      revision = revision or next_revision()
      call('HSET', ENTRIES, name, revision .. ' ' .. ARGV[i + 3])
      call('ZADD', CHANGED, revision, name)
    end
  end
  return {revision or whole(last_revision()), conflicts}
end

if ARGV[1] == 'delete' then
  local name, tomb = ARGV[6], ARGV[7] .. ':' .. ARGV[6]
  if ARGV[8] == '0' or version_of(name) ~= ARGV[8] or not known(ARGV[5]) then
    return {whole(last_revision()), {name}}
  end
  local revision = next_revision()
  call('HDEL', ENTRIES, name)
  call('ZREM', CHANGED, name)
  call('ZADD', REMOVED, revision, tomb)
  call('HSET', FILES, tomb, ARGV[9])
  for _, gone in ipairs(trim(REMOVED, tonumber(ARGV[4]))) do call('HDEL', FILES, gone) end
  return {revision, {}}
end

if ARGV[1] == 'changes' or ARGV[1] == 'removals' then
  local since, entries = '(' .. ARGV[2], {}
  if ARGV[1] == 'changes' then
    if ARGV[3] == '' and ARGV[2] ~= '0' or not known(ARGV[3]) then return {0} end
    for i, name in ipairs(call('ZRANGEBYSCORE', CHANGED, since, '+inf')) do
      entries[i] = call('HGET', ENTRIES, name)
    end
  end
  local removed = {}
  local found = call('ZRANGEBYSCORE', REMOVED, since, '+inf', 'WITHSCORES')
  for i = 1, #found, 2 do
    removed[#removed + 1] = found[i]
    removed[#removed + 1] = found[i + 1]
    removed[#removed + 1] = call('HGET', FILES, found[i]) or '0'
  end
  local complete = '0'
  if call('ZCARD', REMOVED) >= tonumber(ARGV[4]) then
    complete = call('ZRANGE', REMOVED, 0, 0, 'WITHSCORES')[2]
  end
  local mark = call('ZRANGE', MARKS, -1, -1)[1] or ''
  return {1, whole(last_revision()), mark, entries, removed, complete}
end

return redis.error_reply('ERR directory: bad arguments')
