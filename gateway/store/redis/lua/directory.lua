-- directory, version 3: tenants, entitlements and keys that change at run time, and denials,
-- shared by all gateways.
--
-- KEYS[1]  rows      hash: "KIND NAME" -> VERSION CHANGED UID blank JSON
-- KEYS[2]  changed   sorted set: "KIND NAME", by the revision of the last write
-- KEYS[3]  denials   hash: id -> REVISION CHANGED STRICTNESS blank JSON; nothing is ever removed
-- KEYS[4]  denied    sorted set: ids of denials, by the revision of the last write
-- KEYS[5]  marks     sorted set: names of the last writes, by revision
-- KEYS[6]  revision  number of the last write
-- ARGV[1]  write, give_back, read or head, which reads no rows and no denials
-- ARGV[2]  read: the revision last read; else the new write's name
-- ARGV[3]  read: name of the last write that the caller knows, or empty; else a revision that the
--          new one is above
-- ARGV[4]  write: name of the last write that the caller knows, or empty; read: how many rows, and
--          how many denials, one call returns at most
-- ARGV[5]  how many names of writes are kept
-- ARGV[6]  write, give_back: JSON of {puts: [[KIND NAME, uid, revision it is based on, changed,
--          JSON]], removes: [[KIND NAME, revision]], denials: [[id, changed, strictness, JSON]]}
--
-- write and give_back return {revision}, or {-1} if nothing was written. read returns {1, revision,
-- name of the last write, {rows}, {denials}}, or {0} if the named write is not known, or too many
-- are newer.

local ROWS, CHANGED, DENIALS, DENIED, MARKS, REVISION = unpack(KEYS)
local call = redis.call

local function whole(number) return string.format('%.0f', number) end

local function last_revision() return tonumber(call('GET', REVISION) or '0') end

-- Whether a write is known; the empty name, before the first write, always is.
local function known(mark) return mark == '' or call('ZSCORE', MARKS, mark) end

local function gone(uid) return call('HEXISTS', DENIALS, 'gone ' .. uid) == 1 end

-- VERSION, CHANGED, UID and JSON of a kept row; none of one whose uid is gone.
local function kept_row(name)
  local kept = call('HGET', ROWS, name)
  if not kept then return 0, 0, '', '' end
  local revision, changed, uid, text = string.match(kept, '^(%d+) (%d+) (%S*) (.*)$')
  if gone(uid) then return 0, 0, '', '' end
  return tonumber(revision), tonumber(changed), uid, text
end

-- Whether a denial is later, or stricter at the same time, than the kept one.
local function counts(id, changed, strictness)
  local kept = call('HGET', DENIALS, id)
  if not kept then return true end
  local at, strict = string.match(kept, '^%d+ (%d+) (%S+) ')
  at = tonumber(at)
  return changed > at or changed == at and tonumber(strictness) > tonumber(strict)
end

if ARGV[1] == 'head' then
  return {1, whole(last_revision()), call('ZRANGE', MARKS, -1, -1)[1] or ''}
end

if ARGV[1] == 'read' then
  local since = ARGV[2]
  if ARGV[3] == '' or not known(ARGV[3]) or last_revision() < tonumber(since) then return {0} end
  for _, kept in ipairs({CHANGED, DENIED}) do
    if call('ZCOUNT', kept, '(' .. since, '+inf') > tonumber(ARGV[4]) then return {0} end
  end
  local rows, denials = {}, {}
  for i, name in ipairs(call('ZRANGEBYSCORE', CHANGED, '(' .. since, '+inf')) do
    rows[i] = call('HGET', ROWS, name)
  end
  for i, id in ipairs(call('ZRANGEBYSCORE', DENIED, '(' .. since, '+inf')) do
    denials[i] = call('HGET', DENIALS, id)
  end
  return {1, whole(last_revision()), call('ZRANGE', MARKS, -1, -1)[1] or '', rows, denials}
end

local asked, join = cjson.decode(ARGV[6]), ARGV[1] == 'give_back'
if not join then
  if not known(ARGV[4]) then return {-1} end
  for _, put in ipairs(asked.puts) do
    if kept_row(put[1]) ~= put[3] or gone(put[2]) then return {-1} end
  end
  for _, remove in ipairs(asked.removes) do
    if kept_row(remove[1]) ~= remove[2] then return {-1} end
  end
  -- A later one may be of another gateway, at the same time: each would count its own.
  for _, denial in ipairs(asked.denials) do
    if not counts(denial[1], denial[2], denial[3]) then return {-1} end
  end
end

local revision = whole(math.max(last_revision(), tonumber(ARGV[3])) + 1)
call('SET', REVISION, revision)
call('ZADD', MARKS, revision, ARGV[2])
call('ZREMRANGEBYRANK', MARKS, 0, -tonumber(ARGV[5]) - 1)
local function deny(id, changed, strictness, text)
  call('HSET', DENIALS, id, revision .. ' ' .. whole(changed) .. ' ' .. strictness .. ' ' .. text)
  call('ZADD', DENIED, revision, id)
end

for _, denial in ipairs(asked.denials) do
  if not join or counts(denial[1], denial[2], denial[3]) then deny(unpack(denial)) end
end
for _, remove in ipairs(asked.removes) do
  call('HDEL', ROWS, remove[1])
  call('ZREM', CHANGED, remove[1])
end
for _, put in ipairs(asked.puts) do
  local at_revision, changed, uid, text = kept_row(put[1])
  local later = put[4] > changed or put[4] == changed and (put[2] > uid or put[2] == uid and
    (put[5] > text or put[5] == text and put[3] > at_revision))
  if join and uid ~= '' and uid ~= put[2] and not gone(put[2]) then
    local loser = later and uid or put[2]
    local at = whole(later and changed or put[4])
    deny('gone ' .. loser, at, '1', '{"what":"gone","subject":"' .. loser .. '","changed":' .. at .. '}')
  end
  if not join or later and not gone(put[2]) then
    local head = revision .. ' ' .. whole(put[4]) .. ' ' .. put[2] .. ' '
    call('HSET', ROWS, put[1], head .. put[5])
    call('ZADD', CHANGED, revision, put[1])
  end
end
return {revision}
