-- cluster, version 1: the entitlements that the controller of a Kubernetes cluster publishes.
--
-- KEYS[1]  head     hash: epoch and revision of the last write; floor: whoever read less has to
--                   read all; complete: 0 between the calls of one write; at: the server's time in
--                   microseconds of which the writer's knowledge is; sent: ARGV[8] of that write;
--                   namespace: the writer's
-- KEYS[2]  rows     hash: name -> JSON
-- KEYS[3]  changed  sorted set: names, by the revision of their last write
-- KEYS[4]  gone     sorted set: the last names that were removed, by revision
-- ARGV[1]  read or write
-- ARGV[2]  the revision that the caller knows last
-- ARGV[3]  how many changes a reader may have missed; after more it has to read all
-- ARGV[4]  the writer's epoch, or that of what the reader knows
-- ARGV[5]  write, as the following; 1: all that was written before goes
-- ARGV[6]  1: this call completes the write
-- ARGV[7]  age of the writer's knowledge in microseconds
-- ARGV[8]  a number that grows with the writer's calls
-- ARGV[9]  the writer's namespace
-- ARGV[10] how many rows follow; then their names and JSON, then the names to remove
--
-- write returns {1, revision, rows}, {0} where writes up to ARGV[2] were lost, {-1, epoch} if a
-- newer one wrote, or {-2, namespace} if one of another namespace did. read returns {epoch, revision, complete, age, at, 1, {names}, {rows},
-- {removed}}, with 0 and no names where the caller has to read all, or {} if nothing was written.

local HEAD, ROWS, CHANGED, GONE = unpack(KEYS)
local call, since, most = redis.call, tonumber(ARGV[2]), tonumber(ARGV[3])
local function digits(number) return string.format('%.0f', number) end
local clock = call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local epoch, revision, floor, complete, at, sent, namespace = unpack(
  call('HMGET', HEAD, 'epoch', 'revision', 'floor', 'complete', 'at', 'sent', 'namespace'))

if ARGV[1] == 'read' then
  if not epoch then return {} end
  local age, later = digits(math.max(0, now - at)), '(' .. ARGV[2]
  local many = call('ZCOUNT', CHANGED, later, '+inf') + call('ZCOUNT', GONE, later, '+inf')
  if epoch ~= ARGV[4] or since < tonumber(floor) or many > most then
    return {epoch, revision, complete, age, at, '0', {}, {}, {}}
  end
  local names, rows = call('ZRANGEBYSCORE', CHANGED, later, '+inf'), {}
  for i, name in ipairs(names) do
    rows[i] = call('HGET', ROWS, name)
  end
  local removed = call('ZRANGEBYSCORE', GONE, later, '+inf')
  return {epoch, revision, complete, age, at, '1', names, rows, removed}
end

local begins, removes = ARGV[5] == '1', 11 + 2 * ARGV[10]
if namespace and namespace ~= ARGV[9] then return {-2, namespace} end
if epoch and tonumber(epoch) > tonumber(ARGV[4]) then return {-1, epoch} end
-- A later revision of this epoch is the writer's own, whose answer it did not get.
if not begins and (epoch ~= ARGV[4] or tonumber(revision) < since) then return {0} end
if epoch == ARGV[4] and tonumber(sent) >= tonumber(ARGV[8]) then return {0} end  -- too late
if begins then call('UNLINK', ROWS, CHANGED, GONE) end  -- DEL takes 70 ms for 100,000
if begins or #ARGV > 10 then
  -- Above what any reader may know of a server that was emptied.
  revision = digits(math.max(tonumber(revision or '0') + 1, since + 1, now / 1000))
end
for i = 11, removes - 1, 2 do
  call('HSET', ROWS, ARGV[i], ARGV[i + 1])
  call('ZADD', CHANGED, revision, ARGV[i])
  call('ZREM', GONE, ARGV[i])
end
for i = removes, #ARGV do
  call('HDEL', ROWS, ARGV[i])
  call('ZREM', CHANGED, ARGV[i])
  call('ZADD', GONE, revision, ARGV[i])
end
if begins or call('ZCARD', GONE) > most then
  call('DEL', GONE)
  floor = revision
end
call('HSET', HEAD, 'epoch', ARGV[4], 'revision', revision, 'floor', floor, 'complete', ARGV[6],
  'at', digits(now - ARGV[7]), 'sent', ARGV[8], 'namespace', ARGV[9])
return {1, revision, call('HLEN', ROWS)}
